"""The tables of docs/reliability.md: a row for each fault, what is seen first; and their tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")


def rows_of(text: str, head: str) -> list[list[str]]:
    """The cells of all tables with this head."""
    found: list[list[str]] = []
    for table in re.findall(rf"^{re.escape(head)}\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE):
        lines = table.splitlines()
        found += [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return found


PAGE_HEAD = "| what you see | what happened | what is lost | what the log says |"
ROWS = rows_of(PAGE, PAGE_HEAD)
TESTS = {
    "a batch fails": (
        "test_rows_go_on_alone_where_their_batch_raises",
        "test_one_row_that_always_raises_fails_alone",
    ),
    "the model raises in a prefill": (
        "test_a_prefill_that_raises_keeps_what_it_had_committed",
        "test_a_prefill_that_raises_in_a_branch_leaves_the_other_branch_right",
    ),
    "the model raises in a reply": ("test_a_lone_reply_that_raises_keeps_its_prompt",),
    "any other code of one request raises, such as a sampler or a parser": (
        "test_an_exception_in_any_function_fails_its_own_request_alone",
        "test_a_sampler_that_raises_fails_its_own_request",
        "test_a_parser_that_raises_fails_its_own_request",
    ),
    "the model computes NaN": (
        "test_only_conversations_that_hold_forgotten_tokens_go",
        "test_what_others_computed_of_the_same_tokens_stays",
        "test_what_others_share_stays_in_both_tiers",
        "test_what_is_no_numbers_goes_with_all_behind_it",
        "test_what_the_tree_does_not_hold_costs_nobody_else",
        "test_a_reply_of_nan_fails_alone_and_leaves_nothing",
        "test_a_prefill_that_computes_nan_keeps_what_came_before_it",
        "test_nan_that_an_earlier_request_left_goes_too",
        "test_nan_does_not_stay_on_disk",
    ),
    "MLX finds no memory": (
        "test_a_prefill_goes_on_once_others_cache_was_evicted",
        "test_a_reply_goes_on_with_the_tokens_it_would_have_had",
        "test_who_finds_no_memory_twice_is_refused",
    ),
    "a command fails on the GPU": (
        "test_a_pass_that_fails_in_silence_is_computed_again",
        "test_a_restore_that_fails_in_silence_is_made_again",
        "test_an_anticipated_turn_that_fails_is_dropped",
        "test_an_error_met_by_a_copy_for_the_disk_does_not_suspend_the_disk",
        "test_an_error_met_by_a_call_is_met_by_the_requests_too",
        "test_a_random_life_on_a_failing_device",
    ),
    "macOS ends a long command of a prefill": (
        "test_a_chunk_that_the_system_ended_is_fed_in_quarters_from_then_on",
    ),
    "the GPU refuses every command": (
        "test_the_third_error_in_a_row_ends_the_scheduler_with_all_work_on_disk",
        "test_an_engine_on_a_dead_device_says_so_and_its_sessions_go_on_elsewhere",
    ),
    "a template refuses the conversation": ("test_a_template_s_refusal_is_told_in_its_own_words",),
    "a template or a tokenizer raises": (
        "test_a_template_that_breaks_is_not_the_client_s_fault",
        "test_what_breaks_under_one_request_is_told_to_it_alone",
    ),
    "the MLX thread dies: the KV contradicts its accounts, or the thread's loop fails "
    "three times in a row": ("test_a_dead_mlx_thread_ends_the_process_and_the_next_one_is_warm",),
    "a forward pass never returns": (
        "test_a_forward_pass_that_never_returns_shows_in_health",
        "test_a_thread_that_does_not_move_shows_in_health_and_ends_nothing",
    ),
    "the disk is full": (
        "test_a_disk_that_takes_nothing_costs_no_reply",
        "test_a_disk_that_is_full_costs_nothing_but_the_disk",
        "test_a_file_system_that_is_full_refuses_and_recovers",
    ),
    "the disk is read-only": (
        "test_a_disk_that_takes_nothing_costs_no_reply",
        "test_a_file_system_that_is_read_only_is_read",
    ),
    "no byte of the disk is free": (
        "test_commands_free_the_space_of_a_full_disk",
        "test_an_open_store_frees_the_space_of_a_full_disk",
        "test_a_full_disk_is_listed_without_a_byte",
        "test_commands_without_a_server_free_a_full_disk",
        "test_a_server_on_a_full_disk_serves_and_its_commands_free_it",
    ),
    "no file can be written from the start on": (
        "test_a_folder_that_cannot_be_written_is_read",
        "test_a_disk_that_is_read_only_from_the_start_is_read",
        "test_a_server_on_a_read_only_disk_restores_what_is_there",
    ),
    "the disk takes seconds per write": (
        "test_a_disk_of_seconds_per_file_holds_up_nobody",
        "test_a_slow_disk_holds_dirty_segments_in_ram_and_drops_none",
        "test_a_disk_that_hangs_cuts_no_reply",
    ),
    "the cache directory is removed": (
        "test_a_removed_folder_is_made_again",
        "test_what_one_removes_the_other_goes_on_with",
    ),
    "the disk of the cache directory is unmounted": (
        "test_a_folder_whose_disk_is_gone_is_not_made_elsewhere",
    ),
    "the index is locked by another program": ("test_a_locked_index_holds_up_no_list_and_no_stop",),
    "the index is damaged while the server runs": (
        "test_an_index_that_is_damaged_under_an_open_store_is_made_again_by_the_next",
    ),
    "a file is damaged": (
        "test_damaged_files_are_a_miss_and_never_a_wrong_token",
        "test_every_byte_flipped_is_noticed",
    ),
    "kill -9 at any moment": (
        "test_what_is_durable_survives_kill_9_at_any_moment",
        "test_a_death_at_each_step_of_a_save_leaves_nothing",
        "test_three_kills_cost_nothing",
    ),
    "the power fails, or the system crashes": (
        "test_a_run_is_on_the_disk_before_the_index_names_it",
        "test_the_index_empties_the_drives_cache",
        "test_a_sync_on_a_mac_empties_the_drives_cache",
    ),
    "SIGSTOP, then SIGCONT": (
        "test_a_process_that_is_stopped_goes_on_where_it_was",
        "test_a_reader_that_was_stopped_with_the_process_is_not_cancelled",
    ),
    "the clock jumps": (
        "test_a_wall_clock_that_jumps",
        "test_a_clock_that_goes_back_changes_no_order_of_use",
    ),
    "no file descriptors are left": (
        "test_a_server_without_file_descriptors_goes_on_and_recovers",
    ),
    "a connection reset at any byte of the request": (
        "test_a_client_that_resets_at_any_byte_of_its_request",
    ),
    "a connection reset at any byte of the reply": (
        "test_a_client_that_resets_at_any_byte_of_its_reply",
        "test_a_cancelled_prefill_is_continued_by_its_retry",
    ),
    "a client that reads 1 byte per second": (
        "test_a_reader_of_few_bytes_holds_up_nobody",
        "test_a_reader_that_stalls_is_cancelled",
        "test_an_unread_stream_joins_texts_and_loses_none",
    ),
    "10,000 connections": ("test_many_connections_are_all_given_back",),
    "a budget of 1 GB is kept, as the operating system counts memory": (
        "bin/bench --only observed",
    ),
    "when a machine or a container is short of memory, the server returns some at once, "
    "and entries in use stay": (
        "test_the_cache_shrinks_at_once_and_grows_again",
        "test_what_is_in_use_stays",
        "test_what_comes_and_goes_holds_it_down",
    ),
    "a prompt that does not fit into the reduced budget may use the whole of `--ram`": (
        "test_a_request_that_needs_it_has_it",
    ),
    "the number of MLX's buffers stays within the limit of the device": (
        "test_buffers_are_bounded_as_bytes_are",
    ),
    "MLX memory, MLX buffers, open files and threads do not grow with the number of requests": (
        "test_after_300_requests_no_more_is_held_than_after_60",
    ),
    "five attempts of a client that times out cost one prefill, streamed or not": (
        "test_five_tries_cost_one_prefill",
        "test_tries_whose_connections_stay_open_join",
    ),
    "two clients that send the same request at once each get their reply": (
        "test_two_clients_that_ask_the_same_each_get_their_answer",
    ),
    "a request that exceeds its time limit ends in the format of its API, and its KV is kept": (
        "test_a_request_whose_time_is_over",
        "test_a_request_whose_time_is_over_fails_and_is_kept",
    ),
    "sessions with waiting requests take turns, however many requests each has": (
        "test_a_session_with_many_requests_waits_its_turn_like_any_other",
        "test_one_more_session_starts_beside_a_crowd",
    ),
    "while a long prompt is computed, a reply keeps at least half of its speed, and a "
    "short prompt has its first token within three chunks of the long one": (
        "test_a_reply_keeps_half_of_its_speed_beside_a_long_prompt",
        "test_a_short_prompt_is_answered_within_three_chunks",
    ),
    "a reply with any features is the one of a server without a cache": (
        "test_replies_with_random_features_are_the_cold_ones",
        "test_every_familys_replies_are_the_cold_ones",
    ),
    "all faults and loads of this page at once lose no session and no durable token, and "
    "produce no wrong token": ("test_minutes_under_agents_faults_and_kills",),
}
"""Of each row of a table and each claim: the tests that show it, or a measurement."""
CLAIMED = PAGE.split("## Memory and load")[1].split("\n## ")[0]
CLAIMS = TESTS.keys() - {fault for _, fault, *_ in ROWS}
FAULTS = (
    "a batch fails",
    "raises in a prefill",
    "raises in a reply",
    "NaN",
    "no memory",
    "fails on the GPU",
    "ends a long command",
    "GPU refuses",
    "a template refuses",
    "a template or a tokenizer",
    "MLX thread dies",
    "never returns",
    "disk is full",
    "read-only",
    "seconds per write",
    "directory is removed",
    "index is locked",
    "index is damaged",
    "kill -9",
    "SIGSTOP",
    "clock jumps",
    "no file descriptors",
    "byte of the request",
    "byte of the reply",
    "1 byte per second",
    "10,000 connections",
)


def test_every_fault_has_its_row() -> None:
    for fault in FAULTS:
        assert sum(fault in row[1] for row in ROWS) == 1, fault


def test_rows_say_all_and_those_that_a_client_notices_come_first() -> None:
    """No name of a test stands between them and the reader."""
    assert all(len(row) == 4 and all(row) for row in ROWS)
    assert "`test_" not in PAGE
    for part in PAGE.split("\n## "):
        seen = [row[0] for row in rows_of(part, PAGE_HEAD)]
        unseen = [one.startswith(("nothing", "mostly nothing")) for one in seen]
        assert unseen == sorted(unseen), seen


def test_every_row_and_claim_has_its_tests() -> None:
    listed = re.findall(r"^- (.+)$", CLAIMED, re.MULTILINE)
    assert {row[1] for row in ROWS} <= TESTS.keys()
    assert len(listed) == len(CLAIMS)


@pytest.mark.parametrize("name", sorted({name for names in TESTS.values() for name in names}))
def test_the_tests_that_are_named_exist(name: str) -> None:
    """A claim may have a measurement instead."""
    if name.startswith("bin/bench"):
        return
    pattern = re.compile(rf"^\s*(async )?def {name}\(", re.MULTILINE)
    found = [path for path in (ROOT / "tests").rglob("test_*.py") if name in path.read_text()]
    assert any(pattern.search(path.read_text()) for path in found)


@pytest.mark.parametrize("claim", sorted(CLAIMS))
def test_each_claim_stands_in_the_page(claim: str) -> None:
    assert f"- {claim[0].upper()}{claim[1:]}." in " ".join(PAGE.split())
