from datetime import datetime

import pytest

from mesh.errors import ConfigurationError
from services.frontend.text.chat_template import ChatTemplate, ChatTemplateRefused

NOW = datetime(2024, 5, 6).timestamp
USER = [{"role": "user", "content": "hi"}]


def test_a_template_sees_messages_special_tokens_and_the_date() -> None:
    template = ChatTemplate(
        "{{ bos_token }}{% for m in messages %}\n[{{ m.role }}] {{ m.content }}\n{% endfor %}\n"
        "{% if add_generation_prompt %}{{ strftime_now('%Y') }}{% endif %}",
        {"bos_token": "<s>"},
        NOW,
    )
    assert template.render(USER) == "<s>[user] hi\n2024"


@pytest.mark.parametrize(
    ("source", "effort"),
    [
        ("{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}", "none"),
        ("{{ reasoning_effort }}", "none"),
        ("{{ messages[0].content }}", "low"),
        ("{{ 'max' if reasoning_effort not in ['low', 'high'] else reasoning_effort }}", "low"),
        ("{% if reasoning_effort == 'none' %}{{ raise_exception('low, medium or high') }}{% endif %}", "low"),
    ],
)
def test_by_which_effort_a_template_leaves_the_reasoning_away(source: str, effort: str) -> None:
    assert ChatTemplate(source, {}, NOW).effort_without_thinking == effort


@pytest.mark.parametrize(
    ("source", "wants_system_first"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
        (
            "{% for m in messages if m.role == 'system' %}{{ '' if loop.first else raise_exception('') }}{% endfor %}",
            True,
        ),
        ("{{ bos_token + messages[0].content }}", True),
        ("{{ messages[0].content + 1 }}", True),
    ],
)
def test_which_templates_take_a_system_at_the_beginning_only(source: str, wants_system_first: bool) -> None:
    assert ChatTemplate(source, {"bos_token": "<s>"}, NOW).wants_system_first is wants_system_first


def test_json_is_written_without_html_escapes() -> None:
    assert ChatTemplate("{{ messages[0] | tojson }}", {}, NOW).render([{"role": "<é>"}]) == '{"role": "<é>"}'


def test_json_takes_the_arguments_that_templates_know() -> None:
    source = "{{ m | tojson(separators=(',', ':'), sort_keys=true) }}{{ m | tojson(true, 1) }}"
    template = ChatTemplate("{% set m = messages[0] %}" + source, {}, NOW)
    assert template.render([{"role": "é", "a": 1}]) == '{"a":1,"role":"é"}{\n "role": "\\u00e9",\n "a": 1\n}'


def test_what_is_marked_for_training_is_like_the_rest() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}!{% endfor %}"
    assert ChatTemplate(source, {}, NOW).render(USER) == "hi!"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.nothing.at_all }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 1 }}",
        "{{ ''.__class__.__mro__ }}{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ range(999999999) | list }}",
    ],
)
def test_what_a_template_does_not_take_is_refused(source: str) -> None:
    with pytest.raises(ChatTemplateRefused, match="chat template"):
        ChatTemplate(source, {}, NOW).render(USER)


def test_a_template_that_is_no_template_is_a_configuration_error() -> None:
    with pytest.raises(ConfigurationError, match="line 2"):
        ChatTemplate("\n{% if %}", {}, NOW)


_MACRO = "{% macro shown(c) %}{% for p in c %}{{ p.text }}{% endfor %}{% endmacro %}"
TEMPLATES = {
    "{% for m in messages %}{{ m.content }}{% endfor %}": False,
    "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}": True,
    "{% for m in messages %}{% for p in m['content'] | list %}{{ p.text }}{% endfor %}{% endfor %}": True,
    "{% for m in messages %}{% set content = m.content %}{% for p in content %}{{ p }}{% endfor %}{% endfor %}": True,
    _MACRO + "{% for m in messages %}{{ shown(m.content) }}{% endfor %}": True,
    _MACRO + "{% for m in messages %}{{ shown(m.tool_calls) }}{% endfor %}": False,
    "{% for m in messages %}{% for line in m.content.split('a') %}{{ line }}{% endfor %}{% endfor %}": False,
}
"""Whether they go through the parts of a message."""


@pytest.mark.parametrize("source", TEMPLATES)
def test_it_is_known_which_templates_go_through_parts(source: str) -> None:
    assert ChatTemplate(source, {}, lambda: 0.0).takes_parts is TEMPLATES[source]


def test_a_final_message_of_parts_is_gone_on_with() -> None:
    source = "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{{ p.text }}{% endfor %}</>{% endfor %}"
    parts = [{"type": "text", "text": "So "}, {"type": "text", "text": "far"}]
    template = ChatTemplate(source, {}, lambda: 0.0)
    assert template.render_unfinished([{"role": "assistant", "content": parts}]) == "<assistant>So far"
    picture = [*parts, {"type": "image"}]
    assert template.render_unfinished([{"role": "assistant", "content": picture}]) == "<assistant>So far"
    with pytest.raises(ChatTemplateRefused, match="no text to go on with"):
        template.render_unfinished([{"role": "assistant", "content": [{"type": "image"}]}])


def test_a_template_that_trims_trims_what_is_gone_on_with() -> None:
    final = [{"role": "assistant", "content": " So far "}]
    shows = ChatTemplate("{% for m in messages %}<{{ m.content }}>{% endfor %}", {}, NOW)
    assert shows.render_unfinished(final) == "< So far "
    trims = ChatTemplate("{% for m in messages %}<{{ m.content | trim }}>{% endfor %}", {}, NOW)
    assert trims.render_unfinished(final) == "<So far"
