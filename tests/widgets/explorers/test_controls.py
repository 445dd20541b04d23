"""Sliders and menus: ipywidgets' own, at the values of the traits."""

import pytest
from ipywidgets import Button as PlainButton
from ipywidgets import Dropdown, IntSlider, SelectionSlider, jslink

import workbench as wb
from workbench.widgets.explorers.controls import Button, Choice, Slider, decades, powers_of_two

SLIDER = Slider("bandwidth", "bandwidth", (1.0, 10.0, 100.0), "{:g} B/s".format)


@pytest.fixture
def widget():
    """`widget(control)` makes one."""
    made = []

    def make(control):
        made.append(control.widget())
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_slider_shows_how_values_read(widget):
    slider = widget(SLIDER)
    assert type(slider) is SelectionSlider
    SLIDER.show(slider, 10.0)
    assert (slider.label, slider.index, SLIDER.value(slider)) == ("10 B/s", 1, 10.0)


def test_a_value_between_two_others_is_shown_as_it_is(widget):
    slider = widget(SLIDER)
    SLIDER.show(slider, 30.0)
    assert (slider.label, slider.value, len(slider.options)) == ("30 B/s", 30.0, 4)
    SLIDER.show(slider, 100.0)
    assert (slider.label, slider.index, len(slider.options)) == ("100 B/s", 2, 3)


def test_a_range_is_moved_in_without_a_list_of_it(widget):
    control = Slider("rank", "rank", range(65536), str)
    slider = widget(control)
    assert type(slider) is IntSlider
    control.show(slider, 40_000)
    assert (slider.min, slider.max, control.value(slider)) == (0, 65535, 40_000)


def test_choices_are_told_by_how_they_read(widget):
    choice = Choice("codec", "codec", {"none": None, "coarse": "int8"})
    menu = widget(choice)
    assert type(menu) is Dropdown
    choice.show(menu, None)
    assert (menu.value, choice.value(menu)) == ("none", None)
    choice.show(menu, "fp16")
    assert (menu.options, choice.value(menu)) == (("none", "coarse", "fp16"), "fp16")
    menu.value = "coarse"
    assert choice.value(menu) == "int8"


def test_a_button_says_why_it_cannot_be_pressed(widget):
    button = widget(Button("whole", "Show all"))
    assert type(button) is PlainButton
    Button("whole", "Show all", "all is shown").show(button)
    assert (button.disabled, button.tooltip) == (True, "all is shown")


@pytest.mark.slow
def test_controls_are_linked_as_ipywidgets_are(explore):
    one, other = explore(wb.TimingExplorer), explore(wb.TimingExplorer)
    link = jslink((one.controls["width"], "value"), (other.controls["width"], "value"))
    assert link.source == (one.controls["width"], "value")
    link.close()


def test_values_to_move_to():
    assert decades(1.0, 100.0, 2) == (1.0, 3.16, 10.0, 31.6, 100.0)
    assert powers_of_two(3, 30) == (3, 6, 12, 24)
