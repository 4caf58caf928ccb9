"""Models and namespaces that are forgotten: not while something needs them, and nothing of them is another's."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MODELS = "kvstore/catalog/models.py"
SPACES = "kvstore/catalog/spaces.py"
TABLE = "kvstore/catalog/table.py"
T_CATALOG = "tests/catalog/test_forgotten.py"
T_CONTROLLER = "tests/controller/test_forgotten_models.py"
T_SHARED = "tests/tiers/shared/test_while_asked.py"
T_E2E = "tests/e2e/test_forgotten_models.py"

MUTANTS = [
    Mutant(
        "models-with-chunks-go",
        MODELS,
        "        unneeded = (each for each in self.known.values() if not each.is_needed)\n",
        "        unneeded = iter(self.known.values())\n",
        "a model that is served loses its chunks to a new one",
        (f"{T_CATALOG}::test_models_in_use_stay_and_when_all_are_the_new_one_is_refused_by_name",),
    ),
    Mutant(
        "the-newest-model-goes",
        MODELS,
        "        model.used_at = self._use_count\n",
        "        model.used_at = -self._use_count\n",
        "two models in turn push each other out, while one that nobody uses stays",
        (f"{T_CATALOG}::test_the_one_that_was_used_least_recently_goes_and_tells_its_clients",),
    ),
    Mutant(
        "a-geometry-for-ever",
        MODELS,
        "            del self._geometries[weights]\n",
        "            pass\n",
        "every model that ever was keeps a spec",
        (f"{T_CATALOG}::test_a_geometry_is_known_as_long_as_a_model_has_it",),
    ),
    Mutant(
        "a-number-in-one-life",
        TABLE,
        "        self._life_of[number] = (self._life_of[number] + 1) % LIFE_COUNT\n",
        "",
        "an operator's plan for a forgotten model removes the chunks of another",
        (
            f"{T_CATALOG}::test_a_number_that_another_namespace_had_brings_nothing_of_it",
            f"{T_CONTROLLER}::test_a_plan_for_a_forgotten_models_chunk_does_nothing_to_another_ones",
        ),
    ),
    Mutant(
        "a-namespace-with-rows-is-empty",
        TABLE,
        "        self._count_of[space] += 1\n        return row\n",
        "        self._count_of[space] = 1\n        return row\n",
        "the number of a namespace with chunks is given to another",
        (f"{T_CATALOG}::test_models_in_use_stay_and_when_all_are_the_new_one_is_refused_by_name",),
    ),
    Mutant(
        "words-of-forgotten-models",
        SPACES,
        '            self.presence.forget(tags_of(space.salt, b"".join(space.departures)))\n',
        "            pass\n",
        "the presence table grows with every model that was ever here",
        (f"{T_CATALOG}::test_the_catalog_of_two_thousand_models_in_turn_is_bounded",),
    ),
    Mutant(
        "a-store-takes-its-own-namespaces",
        SPACES,
        "            if space.number != UNNUMBERED and space not in beside and not self.is_needed(space):\n",
        "            if space.number != UNNUMBERED and not self.is_needed(space):\n",
        "a store of several parts writes to a namespace that was forgotten for its next part",
        (f"{T_CATALOG}::test_at_their_limit_empty_namespaces_give_their_numbers_up_but_not_a_stores_own",),
    ),
    Mutant(
        "a-store-without-chunks-of-its-own",
        "kvstore/controller/stores/claim.py",
        "            use=self._catalog.use(request.query.fingerprint, spaces),\n",
        "",
        "a store that waits for another one's chunks loses its model meanwhile",
        (f"{T_CONTROLLER}::test_a_model_stays_while_a_store_is_under_way",),
    ),
    Mutant(
        "a-ticket-for-what-others-have",
        "kvstore/controller/fetches/tickets.py",
        "        ticket.use.end()\n",
        "        pass\n",
        "a model that was ever held is never forgotten",
        (f"{T_CONTROLLER}::test_a_model_stays_while_a_lease_a_ticket_or_a_pin_holds_a_chunk",),
    ),
    Mutant(
        "a-lookup-that-waits-loses-its-model",
        "kvstore/controller/fetches/lookup.py",
        "        with self._catalog.use(query.fingerprint):\n            return await self._lookup_wide(",
        "        if True:\n            return await self._lookup_wide(",
        "a lookup that waits for a shared tier gives a ticket for a model that is gone",
        (f"{T_SHARED}::test_a_model_of_which_only_shared_tiers_have_chunks_stays_while_a_ticket_or_a_call_needs_it",),
    ),
    Mutant(
        "clients-of-forgotten-models-fail",
        "clients/kvstore_client/planes/session.py",
        "        self.register(spec, name, timeout_s)\n        return True\n",
        "        return False\n",
        "an engine that comes back after others gets errors until it connects anew",
        (f"{T_E2E}::test_in_turns_every_call_works_and_no_client_connects_again",),
    ),
    Mutant(
        "streams-of-forgotten-models-fail",
        "clients/kvstore_client/planes/incoming.py",
        "    return session.with_model(begun, timeout_s)\n",
        "    return begun()\n",
        "a fetch fails where a lookup before it would have helped",
        (f"{T_E2E}::test_in_turns_every_call_works_and_no_client_connects_again",),
    ),
    Mutant(
        "the-remote-plane-drops-what-is-wrong",
        "kvstore/remote/node.py",
        'error.details() or "", **unpack_fields(error.trailing_metadata()))\n',
        'error.details() or "")\n',
        "clients on other hosts are not told to register again",
        (f"{T_E2E}::test_in_turns_every_call_works_and_no_client_connects_again",),
    ),
]
