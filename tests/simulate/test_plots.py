"""Pictures are whole files with a line per schedule."""

from slipstream.simulate import scale_training
from slipstream.simulate.plots import draw_scaling


def test_scaling_is_drawn(tmp_path):
    reports = scale_training({"phases": {"compute": 10, "lookup": 5}}, "nested", [2, 4], steps=2)
    draw_scaling(tmp_path / "scaling.png", reports)
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["scaling.png"]
