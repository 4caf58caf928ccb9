"""Tests of caches that keep E once more, as those of test_gpu_by_cpu."""

from __future__ import annotations

from tests.e2e.test_gpu_by_cpu import crossed
from tests.e2e.test_kept_e import test_bytes_of_e_come_back, test_e_is_written_as_the_engine_goes_and_fetched_by_ticket

AGAIN = crossed, test_bytes_of_e_come_back, test_e_is_written_as_the_engine_goes_and_fetched_by_ticket
