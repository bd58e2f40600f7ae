"""The data section of a recipe: what is said twice, or cannot go together, is an error."""

import pydantic
import pytest

from looplm.data.recipe import DataRecipe, is_streamed, source_label

FILES = {"kind": "files", "paths": ["a.jsonl"]}
GENERATOR = {"kind": "generator", "function": "package.module:function"}
HUB = {"kind": "hub", "name": "owner/name", "config": "small", "split": "validation"}


def recipe(*sources, **options) -> DataRecipe:
    return DataRecipe.model_validate({"sources": list(sources), **options})


def test_every_kind_of_source_is_read_and_labelled():
    read = recipe(FILES, HUB, {**GENERATOR, "streaming": False}, {"kind": "stdlib"}, {"kind": "shards", "path": "x/y"})
    assert [source_label(source) for source in read.sources] == [
        "files a.jsonl",
        "hub owner/name small validation",
        "generator package.module:function",
        "stdlib",
        "shards x/y",
    ]
    assert not any(is_streamed(source) for source in read.sources)
    assert read.sources[3].part == "train"  # type: ignore[union-attr]


def test_the_resolved_recipe_reads_back_as_itself():
    read = recipe({**FILES, "weight": 1, "format": "chat"}, {**GENERATOR, "weight": 2}, packing="whole")
    dumped = read.model_dump(mode="json", exclude_unset=True)
    assert DataRecipe.model_validate(dumped) == read


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"sources": []}, "at least 1 item"),
        ({"sources": [{**FILES, "path": "x"}]}, "path\n  Extra inputs"),
        ({"sources": [{"kind": "file", "paths": ["x"]}]}, "'file'"),
        ({"sources": [{**FILES, "paths": []}]}, "at least 1 item"),
        ({"sources": [{**FILES, "weight": 0}]}, "greater than 0"),
        ({"sources": [{**FILES, "weight": float("inf")}]}, "finite"),
        ({"sources": [{**FILES, "weight": 1}, FILES]}, "a weight for every source or for none"),
        ({"sources": [FILES, GENERATOR]}, "a streaming source has no known size"),
        ({"sources": [FILES, {**HUB, "streaming": True}]}, "a streaming source has no known size"),
        ({"sources": [{**FILES, "messages_field": "m"}]}, "messages_field is read with format: chat only"),
        ({"sources": [{**FILES, "format": "chat", "text_field": "t"}]}, "text_field is read with format: text only"),
        ({"sources": [{**FILES, "responses_only": False}]}, "responses_only needs format: chat or instruction"),
        ({"sources": [{**FILES, "format": "tokens", "part": "train"}]}, "cannot be split by name"),
        ({"sources": [{**GENERATOR, "function": "package.module"}]}, "String should match pattern"),
        ({"sources": [FILES], "packing": "tight"}, "'ring' or 'whole'"),
        ({"sources": [FILES], "decontaminate": {"against": []}}, "at least 1 item"),
        (
            {"sources": [{**FILES, "format": "tokens"}], "decontaminate": {"against": ["x"]}},
            "decontaminate needs text",
        ),
        ({"sources": [FILES], "stream_block_tokens": 0}, "greater than 0"),
    ],
)
def test_what_cannot_be_meant_is_an_error(section, said):
    with pytest.raises(pydantic.ValidationError) as caught:
        DataRecipe.model_validate(section)
    assert said in str(caught.value)
