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


def test_json_is_written_without_html_escapes() -> None:
    assert ChatTemplate("{{ messages[0] | tojson }}", {}, NOW).render([{"role": "<é>"}]) == '{"role": "<é>"}'


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
