"""A room's public names are loaded when first asked for."""

import sys

import pytest

from slipstream._lazy import exporter


@pytest.fixture
def room(tmp_path, monkeypatch):
    (tmp_path / "lazy_room").mkdir()
    (tmp_path / "lazy_room" / "__init__.py").write_text("")
    (tmp_path / "lazy_room" / "inner.py").write_text("answer = 42\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield exporter("lazy_room", {"question": "inner", "answer": "inner"})
    for name in ("lazy_room", "lazy_room.inner"):
        sys.modules.pop(name, None)


def test_a_name_is_imported_when_asked_for(room):
    load, _ = room
    assert "lazy_room.inner" not in sys.modules
    assert load("answer") == 42


def test_dir_lists_the_names_without_importing(room):
    _, listed = room
    assert listed() == ["answer", "question"]
    assert "lazy_room.inner" not in sys.modules


def test_an_unknown_name_is_an_attribute_error(room):
    with pytest.raises(AttributeError, match="module 'lazy_room' has no attribute 'reply'"):
        room[0]("reply")
