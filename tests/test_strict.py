"""Everything wrong with a recipe is said at once, with its path and the nearest valid key."""

from typing import Annotated, Literal

import pytest
from pydantic import Field, model_validator

from looplm.errors import UserError
from looplm.strict import Strict, nearest, parse


class Cat(Strict):
    kind: Literal["cat"] = "cat"
    lives: int = Field(gt=0)


class Dog(Strict):
    kind: Literal["dog"] = "dog"
    tricks: tuple[float, float] = (0.5, 0.5)


class Ramp(Strict):
    start: int
    end: int

    @model_validator(mode="after")
    def _ordered(self) -> "Ramp":
        if self.end < self.start:
            raise ValueError(f"end {self.end} is below start {self.start}.")
        return self


class Zoo(Strict):
    name: str
    pets: list[Annotated[Cat | Dog, Field(discriminator="kind")]] = []
    batch: Annotated[int, Field(gt=0)] | Ramp = 1
    depth: Annotated[int, Field(gt=0)] | Annotated[Cat | Dog, Field(discriminator="kind")] | None = None
    prior: Literal["uniform"] | Ramp = "uniform"
    mode: Literal["left", "right"] = "left"
    open: bool = False
    share: float = 0.5
    notes: dict[str, int] = {}


def complaint(**data: object) -> str:
    with pytest.raises(UserError) as error:
        parse(Zoo, data, "zoo.yaml", {("pets", 0): "line 3", ("batch",): "line 9"})
    return str(error.value)


def test_what_is_right_is_read() -> None:
    zoo = parse(Zoo, {"name": "a", "batch": 2e3, "pets": [{"kind": "dog", "tricks": [1, 0]}], "notes": {"x": 1}}, "z")
    assert zoo == Zoo(name="a", batch=2000, pets=[Dog(tricks=(1.0, 0.0))], notes={"x": 1})
    assert parse(Zoo, {"name": "a", "depth": None, "prior": {"start": 1, "end": 2}}, "z").prior == Ramp(start=1, end=2)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"name": "a", "opn": True}, "zoo.yaml: opn: unknown key; did you mean open?"),
        ({"name": "a", "zzz": 1}, "unknown key; known here: name, pets, batch"),
        ({}, "zoo.yaml: name: is missing."),
        # Line of the nearest place that has one.
        ({"name": "a", "pets": [{"kind": "cat", "lifes": 3, "lives": 1}]},
         "zoo.yaml: pets.0.lifes (line 3): unknown key; did you mean lives?"),
        ({"name": "a", "pets": [{"kind": "dgo"}]}, "pets.0 (line 3): kind is 'dgo'; did you mean dog? Choose"),
        ({"name": "a", "pets": [{"lives": 1}]}, "pets.0 (line 3): is missing its kind; choose one of cat, dog."),
        ({"name": "a", "pets": [7]}, "pets.0 (line 3): is 7; it must be a mapping"),
        ({"name": "a", "pets": {"kind": "cat"}}, "pets: is a mapping; it must be a list."),
        ({"name": "a", "pets": [{"kind": "dog", "tricks": [0.1, "x"]}]},
         "0.tricks.1 (line 3): is 'x'; it must be a number."),
        ({"name": "a", "batch": "many"}, "batch (line 9): is 'many'; it must be a whole number."),
        ({"name": "a", "batch": 1.5}, "zoo.yaml: batch (line 9): is 1.5; it must be a whole number."),
        ({"name": "a", "batch": 0}, "zoo.yaml: batch (line 9): is 0; it must be above 0."),
        ({"name": "a", "batch": {"start": 1, "ende": 2}}, "batch.ende (line 9): unknown key; did you mean end?"),
        ({"name": "a", "batch": {"start": 3, "end": 2}}, "zoo.yaml: batch (line 9): end 2 is below start 3."),
        ({"name": "a", "depth": {"kind": "cat", "live": 1}}, "depth.live: unknown key; did you mean lives?"),
        ({"name": "a", "depth": {"kind": "rat"}}, "zoo.yaml: depth: kind is 'rat'; did you mean cat?"),
        ({"name": "a", "depth": "deep"}, "zoo.yaml: depth: is 'deep'; it must be a whole number."),
        ({"name": "a", "prior": "unifrom"}, "zoo.yaml: prior: is 'unifrom'; it must be uniform."),
        ({"name": "a", "prior": {"start": 1}}, "zoo.yaml: prior.end: is missing."),
        ({"name": "a", "mode": "rigth"}, "mode: is 'rigth'; did you mean right? Choose one of left, right."),
        ({"name": 3}, "name: is 3; it must be text."),
        ({"name": "a", "share": float("nan")}, "share: is nan; it must be a finite number."),
        ({"name": "a", "notes": {"x": "1"}}, "notes.x: is '1'; it must be a whole number."),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(data: dict[str, object], said: str) -> None:
    text = complaint(**data)
    assert said in text


@pytest.mark.parametrize(
    "data",
    [{"batch": True}, {"batch": "12"}, {"share": "0.5"}, {"share": False}, {"open": 1}, {"open": "true"},
     {"depth": True}, {"pets": [{"kind": "cat", "lives": "9"}]}, {"pets": [{"kind": "dog", "tricks": [True, 0]}]}],
)  # fmt: skip
def test_no_value_is_taken_for_one_of_another_type(data: dict[str, object]) -> None:
    assert "must be" in complaint(name="a", **data)


def test_all_problems_are_told_at_once() -> None:
    text = complaint(nme="a", batch=True, pets=[{"kind": "cat", "lives": 0}])
    assert text.splitlines()[0] == "zoo.yaml has 4 problems:"
    assert [line.split(":")[0].strip() for line in text.splitlines()[1:]] == [
        "batch (line 9)", "name", "pets.0.lives (line 3)", "nme"
    ]  # fmt: skip


@pytest.mark.parametrize("data", [None, [], "text", 3])
def test_only_a_mapping_is_a_recipe(data: object) -> None:
    with pytest.raises(UserError, match="zoo.yaml: is .*; it must be a mapping"):
        parse(Zoo, data, "zoo.yaml")


def test_nearest_knows_when_nothing_is_near() -> None:
    assert nearest("lrr", ["lr", "beta"]) == "lr"
    assert nearest("xyz", ["lr", "beta"]) is None
