from hypothesis import given
from hypothesis import strategies as st

from controlplane.model.instance_trust import InstanceEvidence, ReportState, untrusted_instances

STANDINGS = st.lists(
    st.tuples(st.sampled_from(["m", "n"]), st.booleans(), st.sampled_from(ReportState), st.booleans()), max_size=8
).map(lambda rows: [InstanceEvidence(f"i{number}", *row) for number, row in enumerate(rows)])


@given(STANDINGS)
def test_whom_to_believe(standings: list[InstanceEvidence]) -> None:
    out = untrusted_instances(standings)
    for model in ("m", "n"):
        of_model = [each for each in standings if each.model == model and each.is_ready]
        if any(each.is_linked for each in of_model):
            assert any(each.instance_id not in out for each in of_model), "something lives, and nothing may be placed"
    for each in standings:
        if each.reports is ReportState.FRESH:
            assert each.instance_id not in out, "what the monitor hears of is believed"
        elif not each.is_linked:
            assert each.instance_id in out, "nobody knows that it lives"
        elif each.reports is ReportState.MISSING:
            assert each.instance_id not in out


@given(STANDINGS)
def test_one_whose_reports_have_stopped_is_left_alone_while_its_model_has_a_better_one(
    standings: list[InstanceEvidence],
) -> None:
    out = untrusted_instances(standings)
    for each in standings:
        others = [one for one in standings if one.model == each.model and one.is_ready]
        if each.reports is ReportState.STALE and any(one.reports is ReportState.FRESH for one in others):
            assert each.instance_id in out
