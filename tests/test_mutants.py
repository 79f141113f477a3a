"""The list of planted mistakes follows the library."""

import dataclasses

import pytest

import mutants


@pytest.mark.parametrize("mistake", mutants.mistakes(), ids=lambda m: f"{m.part}: {m.what}")
def test_a_planted_mistake_has_its_place(mistake):
    text = (mutants.ROOT / mutants.LIBRARY / mistake.file).read_text()
    planted = mistake.planted(text)
    assert planted != text
    compile(planted, mistake.file, "exec") if mistake.file.endswith(".py") else None


@pytest.mark.parametrize("change", [{"old": "no such text"}, {"old": "e"}, {"function": "no_such_function"}])
def test_a_pattern_that_does_not_occur_once_is_an_error(change):
    mistake = mutants.mistakes()[0]
    text = (mutants.ROOT / mutants.LIBRARY / mistake.file).read_text()
    with pytest.raises(LookupError, match=r"matches|definitions"):
        dataclasses.replace(mistake, **change).planted(text)


def test_a_list_of_more_than_a_hundred_is_refused(tmp_path):
    entry = '[[mistake]]\npart = "a"\nwhat = "b"\nfile = "c"\nfunction = "d"\nold = "e"\nnew = "f"\ntests = "g"\n'
    (tmp_path / "mistakes.toml").write_text(entry * 101)
    with pytest.raises(ValueError, match="at most 100 mistakes, got 101"):
        mutants.mistakes(tmp_path / "mistakes.toml")
