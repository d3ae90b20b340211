"""The builders of schedules, by name."""

from raymoe.schedule.builders.in_place import build_in_place

BUILDERS = {"in_place": build_in_place}
