from rlcore.retraining.active import only_one, record_trained, take_notes, trained_hashes


def test_the_second_leaves_a_note_that_is_taken_once(tmp_path):
    with only_one(tmp_path, "first", {"files": ["a"]}) as is_first:
        assert is_first
        for files in (["b"], ["c"]):
            with only_one(tmp_path, "second", {"files": files}) as is_active:
                assert not is_active
    assert take_notes(tmp_path) == {"files": ["c"]}
    assert take_notes(tmp_path) is None


def test_one_that_ran_alone_leaves_no_note(tmp_path):
    with only_one(tmp_path, "first", {"files": ["a"]}) as is_first:
        assert is_first
    assert take_notes(tmp_path) is None


def test_a_note_left_before_the_first_held_the_lock_is_kept(tmp_path):
    # The other wrote its note, but had not tried the lock yet.
    with only_one(tmp_path, "first", {"files": ["a"]}):
        with only_one(tmp_path, "second", {"files": ["b"]}) as is_active:
            assert not is_active
        with only_one(tmp_path, "third", {"files": ["c"]}) as is_active:
            assert not is_active
    with only_one(tmp_path, "fourth", {"files": ["d"]}) as is_active:
        assert is_active
    assert take_notes(tmp_path) == {"files": ["c"]}


def test_trained_hashes_are_remembered(tmp_path):
    assert trained_hashes(tmp_path) == {}
    record_trained(tmp_path, "h1", "run-1")
    record_trained(tmp_path, "h2", "run-2")
    assert trained_hashes(tmp_path) == {"h1": "run-1", "h2": "run-2"}
