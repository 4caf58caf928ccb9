"""Names: what differs must never share one."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

KEYS = "kvstore/keys.py"
T_KEYS = "tests/keys/test_keys.py"

MUTANTS = [
    Mutant(
        "chain-without-its-parent",
        KEYS,
        'blake3(_PREFIX + parent + (len(tokens) // 4).to_bytes(4, "little") + tokens + extras)',
        'blake3(_PREFIX + (len(tokens) // 4).to_bytes(4, "little") + tokens + extras)',
        "the same words after another text are served with that text's cache",
        (f"{T_KEYS}::test_a_chain_extends_its_prefix_and_nothing_else",),
    ),
    Mutant(
        "chain-without-its-extras",
        KEYS,
        'blake3(_PREFIX + parent + (len(tokens) // 4).to_bytes(4, "little") + tokens + extras)',
        'blake3(_PREFIX + parent + (len(tokens) // 4).to_bytes(4, "little") + tokens)',
        "one image's cache is served for another, one tenant's salt for another's",
        (f"{T_KEYS}::test_extras_change_the_chunk_they_are_in_and_all_after",),
    ),
    Mutant(
        "kept-tokens-of-another-width",
        "clients/kvstore_client/prompt.py",
        "np.frombuffer(data, dtype)",
        'np.frombuffer(data, "<u4")',
        "tokens that came in another dtype are named as other tokens",
        ("tests/e2e/test_prompts.py::test_bytes_of_another_dtype_are_other_tokens",),
    ),
    Mutant(
        "extra-without-its-position",
        KEYS,
        'parts.append(struct.pack("<QI", extra.position - start, len(extra.data)) + extra.data)',
        'parts.append(struct.pack("<QI", 0, len(extra.data)) + extra.data)',
        "an image elsewhere in the prompt is the same image",
        (f"{T_KEYS}::test_the_same_tokens_have_a_name_of_their_own_in_each_domain",),
    ),
    Mutant(
        "segment-named-like-a-prefix",
        KEYS,
        "    return [first, *_chained(first, tokens, chunk_tokens, chunk_tokens, ordered)]",
        "    return _chained(ROOT_DIGEST, tokens, 0, chunk_tokens, ordered)",
        "what was computed alone is served as what was computed in context",
        (f"{T_KEYS}::test_a_segments_chunks_are_named_by_all_tokens_up_to_their_end",),
    ),
    Mutant(
        "segment-of-any-preamble",
        KEYS,
        "    domain = _BEHIND + behind if behind else _CONTENT\n",
        "    domain = _BEHIND if behind else _CONTENT\n",
        "a document that was computed behind another preamble is taken for exact",
        (f"{T_KEYS}::test_a_segment_behind_another_preamble_shares_no_name",),
    ),
    Mutant(
        "fingerprint-without-its-kind",
        KEYS,
        '-1 if layer is None else layer) + kind.value.encode() + b"\\0"',
        '-1 if layer is None else layer) + b"\\0"',
        "hidden states are looked for among keys and values",
        (f"{T_KEYS}::test_kinds_and_layers_do_not_share_a_name",),
    ),
    Mutant(
        "fingerprint-without-its-layer",
        KEYS,
        "FORMAT_VERSION, -1 if layer is None else layer)",
        "FORMAT_VERSION, -1)",
        "the hidden states of one layer are served for another's",
        (f"{T_KEYS}::test_kinds_and_layers_do_not_share_a_name",),
    ),
    Mutant(
        "storage-key-without-exactness",
        KEYS,
        "front = blake3(_STORAGE + namespace + _PROVENANCES[provenance] + _EXACTNESSES[exactness], key=secret)",
        "front = blake3(_STORAGE + namespace + _PROVENANCES[provenance], key=secret)",
        "what was derived is served as exact",
        (f"{T_KEYS}::test_nothing_that_differs_shares_a_name",),
    ),
    Mutant(
        "storage-key-without-provenance",
        KEYS,
        "front = blake3(_STORAGE + namespace + _PROVENANCES[provenance] + _EXACTNESSES[exactness], key=secret)",
        "front = blake3(_STORAGE + namespace + _EXACTNESSES[exactness], key=secret)",
        "a document's own cache is served as one in context",
        (f"{T_KEYS}::test_nothing_that_differs_shares_a_name",),
    ),
    Mutant(
        "storage-key-without-the-tenants-secret",
        KEYS,
        "front = blake3(_STORAGE + namespace + _PROVENANCES[provenance] + _EXACTNESSES[exactness], key=secret)",
        "front = blake3(_STORAGE + namespace + _PROVENANCES[provenance] + _EXACTNESSES[exactness], key=bytes(32))",
        "anybody can name another tenant's chunks on a device that both use",
        (f"{T_KEYS}::test_nothing_that_differs_shares_a_name",),
    ),
    Mutant(
        "tokens-outside-the-vocabulary",
        KEYS,
        "    if low < 0 or high >= vocab_size:",
        "    if low < 0:",
        "a token past 32 bits is named like another one",
        (f"{T_KEYS}::test_bad_tokens_are_named",),
    ),
    Mutant(
        "tokens-that-are-no-numbers",
        KEYS,
        '    if array.dtype.kind not in "iu":',
        "    if False:",
        "0.5 and 0.7 are the same token",
        (f"{T_KEYS}::test_bad_tokens_are_named",),
    ),
]
