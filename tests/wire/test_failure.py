"""A failed call becomes the typed error of its status, whoever answered it and whatever fields came with it."""

from __future__ import annotations

import pytest
from kvstore_client.planes.session import ClientSession

from kvstore.errors import UNREGISTERED, DataLoss, from_status
from kvstore.wire import METADATA_ERROR, pack_fields, unpack_fields


@pytest.mark.parametrize("told", ["", "{", "[1]", "null", "7", "[" * 8000, b"\xff"])
def test_what_is_no_object_tells_nothing(told: str | bytes) -> None:
    assert unpack_fields([("other", "x"), (METADATA_ERROR, told)]) == {}


def test_fields_of_any_name_travel() -> None:
    fields: dict[str, object] = {"message": "m", "status": "s", "reason": "strips"}
    error = from_status("DATA_LOSS", "lost", **unpack_fields([(METADATA_ERROR, pack_fields(fields))]))
    assert (type(error), error.message, error.fields) == (DataLoss, "lost", fields)


def test_a_model_that_is_not_named_in_digits_is_not_registered_again() -> None:
    error = from_status("INVALID_ARGUMENT", "unknown", **{UNREGISTERED: "no digits"})
    assert not ClientSession().registers_again(error, 1.0)
