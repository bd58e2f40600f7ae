import json

import pytest
from pydantic import ValidationError

from looplm.report.schema import Phase, QuickstartReport


def test_json_round_trip_is_exact(report: QuickstartReport) -> None:
    assert QuickstartReport.model_validate_json(report.model_dump_json()) == report


def test_an_unknown_key_is_refused(report: QuickstartReport) -> None:
    content = json.loads(report.model_dump_json())
    content["trained"]["bits_per_bite"] = 1.0
    with pytest.raises(ValidationError, match="bits_per_bite"):
        QuickstartReport.model_validate(content)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_figures_are_finite(value: float) -> None:
    with pytest.raises(ValidationError, match="finite"):
        Phase(name="Stage I", seconds=value)
