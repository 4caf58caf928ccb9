"""The device: what is believed of it, and what a crash must not undo."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

CONTRACT = "kvstore/tiers/contract.py"
DIRECTORY = "kvstore/tiers/nvme/directory.py"
IO = "kvstore/tiers/nvme/io.py"
OUTGOING = "kvstore/tiers/nvme/outgoing.py"
READING = "kvstore/tiers/nvme/reading.py"
RECOVERY = "kvstore/tiers/nvme/recovery.py"
REGIONS = "kvstore/tiers/nvme/regions.py"
FILES = "kvstore/tiers/nvme/files.py"
ERASURES = "kvstore/tiers/nvme/erasures.py"
SYNC = "kvstore/tiers/nvme/sync.py"
TIER = "kvstore/tiers/nvme/tier.py"
NEWEST = "kvstore/tiers/nvme/newest.py"
DEVICE = "kvstore/server/tiers.py"
T_NEWEST = "tests/tiers/nvme/test_newest.py"
T_ERASURES = "tests/tiers/nvme/test_erasures.py"
T_UNSEEN = "tests/tiers/nvme/test_unseen.py"
T_CONTRACT = "tests/contracts/local/test_room.py"
T_WEATHER = "tests/contracts/local/test_weather.py"
T_COPIES = "tests/contracts/local/test_copies.py"
T_DIRECTORY = "tests/tiers/nvme/test_directory.py"
T_AGE = "tests/tiers/nvme/test_age.py"
T_OTHER_FORMATS = "tests/tiers/nvme/test_other_formats.py"
T_SNAPSHOT = "tests/tiers/nvme/test_snapshot.py"
T_ERRORS = "tests/tiers/nvme/test_errors.py"

MUTANTS = [
    Mutant(
        "refused-record-that-is-there",
        "kvstore/tiers/nvme/newest.py",
        "        self._marks, self.closed = {**self._marks, **marks}, self.closed | closed\n",
        "",
        "a value that was acknowledged is not believed after a restart: a record that was refused names another write",
        ("tests/tiers/nvme/test_newest_uncertain.py::test_a_value_behind_a_record_that_was_refused_stays",),
    ),
    Mutant(
        "times-of-another-snapshot",
        DIRECTORY,
        "        if data[:_CLEAN_BYTES] != bytes.fromhex(clean) or len(data) != _CLEAN_BYTES + 4 * count:\n",
        "        if len(data) != _CLEAN_BYTES + 4 * count:\n",
        "chunks are evicted by the age of others",
        (f"{T_AGE}::test_without_its_times_a_snapshot_is_read_and_ages_are_not_known[another's]",),
    ),
    Mutant(
        "another-chunk-in-the-slot",
        CONTRACT,
        "    if header.storage_key != name.storage_key:\n",
        "    if False:\n",
        "another chunk's bytes, whole and checked, are served",
        ("tests/tiers/nvme/test_strangers.py::test_a_region_file_of_another_tenant_serves_nobody",),
    ),
    Mutant(
        "another-write-in-the-slot",
        CONTRACT,
        "    if name.mark is not None and write_mark(header.write_id) != name.mark:\n",
        "    if False:\n",
        "an earlier value is served for the one that was acknowledged",
        (f"{T_COPIES}::test_two_writes_of_a_chunk_are_told_apart",),
    ),
    Mutant(
        "read-and-unchecked",
        READING,
        "    return stored.are_right(room)\n",
        "    return True\n",
        "what rotted on the device is served",
        (f"{T_DIRECTORY}::test_a_flipped_chunk",),
    ),
    Mutant(
        "read-and-bad-and-served",
        READING,
        "        if not await self._owner.run_read(read_slabs,",
        "        if None is await self._owner.run_read(read_slabs,",
        "what failed its check is served",
        (f"{T_DIRECTORY}::test_a_flipped_chunk",),
    ),
    Mutant(
        "decoded-and-bad-and-served",
        "kvstore/chunk/making.py",
        "        if not decode_slab(header, layout, slab, stored[start : start + size], into, seeds):\n",
        "        if decode_slab(header, layout, slab, stored[start : start + size], into, seeds) is None:\n",
        "a compressed slab that failed its check is served",
        (f"{T_WEATHER}::test_one_bad_slab_leaves_the_others",),
    ),
    Mutant(
        "read-past-the-end",
        IO,
        '                    raise DataLoss("the region file ends before its slots do", reason="truncated")\n',
        "                    break\n",
        "memory that nothing was read into is taken for what the device has",
        (
            f"{T_DIRECTORY}::test_a_truncated_region",
            "tests/tiers/nvme/test_strangers.py::test_a_file_that_ends_early_is_a_loss",
        ),
    ),
    Mutant(
        "damaged-snapshot-believed",
        DIRECTORY,
        "open_file(ring, _INDEX_ABOUT, packed) if xxhash.xxh3_128_hexdigest(packed) == clean else None\n",
        "open_file(ring, _INDEX_ABOUT, packed)\n",
        "a catalog is made of what rotted, or of another time",
        (
            f"{T_SNAPSHOT}::test_a_snapshot_of_another_time_is_not_believed",
            f"{T_SNAPSHOT}::test_a_damaged_snapshot_costs_a_scan",
        ),
    ),
    Mutant(
        "snapshot-believed-twice",
        DIRECTORY,
        '            self._write_format("")  # no copy of an old snapshot is believed later on\n',
        "            pass\n",
        "after a crash a snapshot that somebody put back hides what was stored since",
        (f"{T_SNAPSHOT}::test_a_snapshot_of_another_time_is_not_believed",),
    ),
    Mutant(
        "snapshot-of-one-slot-twice",
        RECOVERY,
        "    if len(np.unique(columns.residencies & PLACE_MASK)) != len(columns):\n        return False\n",
        "",
        "two chunks are looked for in one slot, and freeing one frees the other's",
        ("tests/tiers/nvme/test_strangers.py::test_a_snapshot_that_does_not_fit_the_files_is_not_believed",),
    ),
    Mutant(
        "snapshot-beyond-its-files",
        RECOVERY,
        "        if region is not None and int(slots[numbers == number].max()) >= region.slot_count:\n",
        "        if False:\n",
        "chunks are promised in slots that no file has",
        ("tests/tiers/nvme/test_strangers.py::test_a_snapshot_that_does_not_fit_the_files_is_not_believed",),
    ),
    Mutant(
        "directory-of-a-newer-release",
        DIRECTORY,
        "        if not isinstance(minimum, int) or minimum > FORMAT or unknown:\n",
        "        if not isinstance(minimum, int) or unknown:\n",
        "a release that does not know a format writes over it",
        (f"{T_OTHER_FORMATS}::test_a_future_format_is_refused_and_untouched",),
    ),
    Mutant(
        "region-of-a-newer-release",
        FILES,
        "        if reader > FORMAT or features:\n",
        "        if False:\n",
        "slots of a form that nobody here knows are written over",
        (f"{T_OTHER_FORMATS}::test_a_region_of_a_future_format_is_left_alone",),
    ),
    Mutant(
        "region-page-unchecked",
        FILES,
        "        if magic != MAGIC or not slot_bytes or checksum != xxhash.xxh3_64_digest(head):\n",
        "        if magic != MAGIC or not slot_bytes:\n",
        "a flipped bit in a file's first page moves all its slots",
        (f"{T_DIRECTORY}::test_a_flipped_header_page_loses_nothing",),
    ),
    Mutant(
        "two-services-on-one-directory",
        DIRECTORY,
        "            if not disk.lock(self._lock, LOCK_WAIT_S):\n",
        "            if False:\n",
        "two services write to the same slots",
        (f"{T_OTHER_FORMATS}::test_one_directory_one_service",),
    ),
    Mutant(
        "failed-sync-is-forgotten",
        SYNC,
        "        if region.number not in batch.synced or region.sync_failures != failures:\n",
        "        if region.number not in batch.synced:\n",
        "a write that a failed sync dropped is acknowledged by the next one, which finds nothing to do",
        (f"{T_ERRORS}::test_a_failed_sync_acknowledges_nothing_that_it_took_along",),
    ),
    Mutant(
        "failed-sync-and-written-on",
        SYNC,
        "                region.is_read_only = True\n",
        "                pass\n",
        "a device that drops writes is given more of them",
        (f"{T_ERRORS}::test_a_region_whose_erasure_could_not_be_synced_takes_no_more",),
    ),
    Mutant(
        "bad-copies-come-back",
        TIER,
        "            await self._erase(region, slot)\n            self.regions.rest(region, slot)\n",
        "            self.regions.rest(region, slot)\n",
        "a copy that failed its check is found again by the next scan",
        (f"{T_DIRECTORY}::test_a_flipped_chunk",),
    ),
    Mutant(
        "unknown-slots-are-used-again",
        TIER,
        "            region.unerased.add(slot)\n        else:\n",
        "            self.regions.give_back(region, slot)\n        else:\n",
        "a write that failed half-way lies whole on the device, and nobody remembers that it does",
        (f"{T_NEWEST}::test_an_older_value_never_comes_back",),
    ),
    Mutant(
        "older-write-believed",
        NEWEST,
        "        return self._is_damaged or self._closes(place) or self._marks.get(key, mark) != mark\n",
        "        return self._is_damaged or self._closes(place)\n",
        "a scan brings an older value back where a newer one was acknowledged",
        (f"{T_NEWEST}::test_an_older_value_never_comes_back",),
    ),
    Mutant(
        "damaged-memory-of-what-is-newest",
        NEWEST,
        "        return self._is_damaged or self._closes(place) or self._marks.get(key, mark) != mark\n",
        "        return self._closes(place) or self._marks.get(key, mark) != mark\n",
        "where nobody knows any more what is newest, anything is believed",
        (f"{T_NEWEST}::test_more_keys_than_are_remembered",),
    ),
    Mutant(
        "erasures-of-an-earlier-process-believed",
        RECOVERY,
        "            region.unerased.update(slots.erased)\n",
        "            pass\n",
        "a value whose erasure was never synced comes back with a power cut, after another one took its place",
        (f"{T_ERASURES}::test_an_erasure_that_only_the_page_cache_has",),
    ),
    Mutant(
        "what-is-to-be-erased-is-free",
        REGIONS,
        "            is_free[list(region.unread | region.unerased)] = False\n",
        "            is_free[list(region.unread)] = False\n",
        "a slot takes a chunk while it is erased, and is free twice afterwards",
        (f"{T_ERASURES}::test_an_erasure_that_only_the_page_cache_has",),
    ),
    Mutant(
        "erased-again-while-in-use",
        ERASURES,
        "if slot in region.unerased]\n",
        "]\n",
        "who erases what was left erases a chunk that was written there meanwhile",
        (f"{T_ERASURES}::test_who_erases_what_is_left_leaves_what_another_erased_meanwhile",),
    ),
    Mutant(
        "one-of-two-writes-believed",
        RECOVERY,
        "row for rows in self._replaceable.values() if len({self._rows[row][1] for row in rows}) > 1 for row in rows",
        "row for rows in self._replaceable.values() if False for row in rows",
        "of two values of one key either is served",
        (f"{T_NEWEST}::test_of_two_writes_of_one_key_that_nobody_can_order_neither_is_served",),
    ),
    Mutant(
        "newest-is-forgotten-too-early",
        NEWEST,
        "        self._replace(self._marks if unseen and not self._is_damaged else {}, frozenset(closed))\n",
        "        self._replace({}, frozenset(closed))\n",
        "while an older write may still lie where nobody could look, which is newer is forgotten",
        (f"{T_NEWEST}::test_an_older_value_never_comes_back",),
    ),
    Mutant(
        "files-that-do-not-open-are-forgotten",
        RECOVERY,
        "        if snapshot.regions is not None and number not in snapshot.regions\n",
        "        if False\n",
        "what lay in a file that one start could not open is gone after the next clean stop",
        (f"{T_UNSEEN}::test_a_file_that_one_start_cannot_open_comes_back",),
    ),
    Mutant(
        "unread-slots-are-used",
        RECOVERY,
        "            region.unread.update(slots.refused, slots.locked)\n",
        "            pass\n",
        "one read error at a start, and an acknowledged chunk is overwritten",
        (f"{T_UNSEEN}::test_a_header_that_one_scan_cannot_read_is_read_at_the_next_start",),
    ),
    Mutant(
        "what-is-not-read-takes-no-room",
        "kvstore/tiers/nvme/regions.py",
        "        files = [(size - PAGE_BYTES, size, name) for name, size in self.away.items() if size]\n",
        "        files = list[tuple[int, int, str]]()\n",
        "files exceed a capacity that was made smaller, and what can be served goes for what cannot",
        ("tests/tiers/nvme/test_capacity.py::test_a_file_that_a_start_cannot_open_goes_as_a_full_one_would",),
    ),
    Mutant(
        "what-a-smaller-capacity-takes",
        DEVICE,
        "    _keep_capacity(directory, settings.capacity_bytes)\n",
        "",
        "the default capacity follows the free room, and deletes what was acknowledged",
        ("tests/tiers/nvme/test_capacity.py::test_the_default_is_chosen_once",),
    ),
    Mutant(
        "quarantine-without-an-end",
        REGIONS,
        "        if len(region.quarantined) > max(1, region.slot_count // QUARANTINE_SHARE):\n",
        "        if False:\n",
        "errors that pass take the device's room for good",
        (f"{T_DIRECTORY}::test_quarantine_is_capped_and_counted",),
    ),
    Mutant(
        "stalled-device-is-asked-on",
        "kvstore/movement/loads.py",
        "            if row in copies and copies.tier.stalled_s() <= STALL_S:\n",
        "            if row in copies:\n",
        "every reader waits for a device that answers nobody",
        ("tests/tiers/nvme/test_stalled.py::test_lookups_memory_hits_and_stores_end_before_a_stalled_read_does",),
    ),
    Mutant(
        "files-renamed-before-they-are-synced",
        "kvstore/seams/disk.py",
        "        disk.sync(descriptor)\n    finally:",
        "        pass\n    finally:",
        "after a power cut the format file is empty, and the directory anybody's",
        ("tests/tiers/nvme/test_recovered.py::test_a_clean_stop_outlives_a_power_cut",),
    ),
    Mutant(
        "chunk-that-ends-in-the-next-slot",
        "kvstore/tiers/nvme/reading.py",
        "        if start + byte_count > self._region.slot_bytes:\n",
        "        if False:\n",
        "a chunk is read to the end of the next one",
        ("tests/tiers/nvme/test_corruption.py::test_an_encoded_chunk_that_ends_in_the_next_slot_is_not_served",),
    ),
    Mutant(
        "directory-that-a-power-cut-takes",
        "kvstore/seams/disk.py",
        "        if is_new:\n            with suppress(PermissionError):\n",
        "        if False:\n            with suppress(PermissionError):\n",
        "the whole device directory is gone after a power cut",
        ("tests/seams/test_disk_contract.py::test_a_new_directory_is_synced_where_its_name_is",),
    ),
    Mutant(
        "empty-memory-of-what-is-newest",
        "kvstore/tiers/nvme/newest.py",
        "        self._is_damaged = not data or len(data) % size != 0\n",
        "        self._is_damaged = len(data) % size != 0\n",
        "a file that a crash emptied says that nothing is newer than anything",
        (
            "tests/tiers/nvme/test_strangers.py::test_of_a_memory_of_what_is_newest_that_was_cut_nothing_replaceable_is_believed",
        ),
    ),
    Mutant(
        "region-given-up-for-what-never-fits",
        "kvstore/tiers/nvme/free_slots.py",
        "        if self._regions.could_hold(slot_bytes):\n",
        "        if True:\n",
        "a chunk that the device can never hold drives others out, each time it is tried",
        (f"{T_CONTRACT}::test_a_chunk_that_could_never_fit_drives_nothing_out",),
    ),
    Mutant(
        "regions-of-chunks-nobody-knows",
        "kvstore/tiers/nvme/slots.py",
        "self.encodings[slot] << FLAGS_SHIFT | self.number << 32",
        "self.number << 32",
        "nothing of another size ever makes room: what lies in a region is named by numbers that nobody knows",
        (f"{T_CONTRACT}::test_chunks_of_another_size_make_room",),
    ),
    Mutant(
        "encodings-forgotten-by-a-start",
        REGIONS,
        "np.uint8)[used] = residencies[first:stop] >> FLAGS_SHIFT & FLAGS_MASK\n",
        "np.uint8)[:0] = 0\n",
        "what an earlier process stored is never given up for a chunk of another size",
        (f"{T_CONTRACT}::test_what_a_start_found_makes_room",),
    ),
    Mutant(
        "clean-stop-erases-nothing",
        TIER,
        "        if held is not None:\n            await self.erasures.erase_doomed()\n",
        "",
        "what was removed for ever lies there after a clean stop, for the scan of a later crash to find",
        (f"{T_WEATHER}::test_what_was_erased_never_comes_back",),
    ),
    Mutant(
        "stray-copies-scanned",
        RECOVERY,
        "    if header is None or not is_seated(data, region, slot):\n",
        "    if header is None:\n",
        "a stray copy of a value that was replaced comes back after a crash",
        (f"{T_NEWEST}::test_an_older_value_never_comes_back", f"{T_NEWEST}::test_a_value_says_where_it_was_written"),
    ),
    Mutant(
        "stray-copies-read",
        READING,
        "    if not is_seated(page, region, slot):\n",
        "    if False:\n",
        "a copy that was written to another place is served from a snapshot",
        (f"{T_NEWEST}::test_a_value_says_where_it_was_written",),
    ),
    Mutant(
        "values-without-a-seat",
        OUTGOING,
        "(seated(runs, self.layout.header_bytes, seat) if self.may_be_replaced else runs,)",
        "(runs,)",
        "a stray copy cannot be told from the value",
        (f"{T_NEWEST}::test_an_older_value_never_comes_back", f"{T_NEWEST}::test_a_value_says_where_it_was_written"),
    ),
]
