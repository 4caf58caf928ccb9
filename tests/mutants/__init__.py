"""The lines that safety rests on, each weakened on purpose, and the tests that must notice.

A test that nothing can break proves nothing. So each list of this room (``chunk``, ``client``, ...) names lines of one
room of the product: what the line becomes, what would follow, and the few tests that have to fail then.
``python -m tests.mutants`` (``make mutants``) first runs all of these tests on the code as it is, then each mutant's on
the mutant. It works on copies of the files that git knows, in a temporary directory: the tree itself is never changed.

A mutant that survives is a test that is missing, or a line that does nothing and goes. ``test_lists`` runs with the
other tests and keeps the lists true: every line is where its list says, once, and every test is there.

Cost: 2 to 10 s per mutant, two at a time.
"""

from tests.mutants.mutant import Mutant

__all__ = ["Mutant"]
