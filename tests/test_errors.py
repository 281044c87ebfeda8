"""Messages guess what was meant, or list the choices."""

from slipstream.errors import did_you_mean


def test_a_near_miss_gets_the_nearest_choice():
    assert did_you_mean("shedule", ["schedule", "seed"]) == "; did you mean 'schedule'?"


def test_a_far_miss_gets_all_choices_in_order():
    assert did_you_mean("zzz", ["seed", "schedule"]) == "; choose one of schedule, seed"
