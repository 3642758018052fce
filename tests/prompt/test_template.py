import pytest

from mlxcache.errors import BadRequest, GenerationFailed
from mlxcache.prompt.template import Template, render_plain
from tests.prompt import kinds, templates

USER = {"role": "user", "content": "hi"}


def test_a_template_s_refusal_is_told_in_its_own_words() -> None:
    template = Template(kinds.tokenizer("byte_level", templates.GEMMA))
    with pytest.raises(BadRequest, match="must alternate"):
        template.render([USER, USER], generation=True, args={})


@pytest.mark.parametrize("source", ["{{ messages[5].x.y }}", "{{ 1 + 'a' }}", "{% if %}"])
def test_a_template_that_breaks_is_not_the_client_s_fault(source: str) -> None:
    template = Template(kinds.tokenizer("byte_level", source))
    with pytest.raises(GenerationFailed, match="chat template failed"):
        template.render([USER], generation=True, args={})


def test_the_plain_form_names_roles() -> None:
    text = render_plain([USER, {"role": "assistant", "content": "yes"}], "<s>", generation=True)
    assert text == "<s>User: hi\n\nAssistant: yes\n\nAssistant:"


def test_the_plain_form_starts_with_the_start_token_only_if_the_tokenizer_adds_it() -> None:
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    template = Template(kinds.tokenizer("byte_level", None))
    assert template.render([USER], generation=False, args={}) == "User: hi\n\n"
    backend = kinds.byte_level()
    start = [("<s>", backend.token_to_id("<s>"))]
    backend.post_processor = processors.TemplateProcessing("<s> $A", None, start)
    inner = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
    template = Template(kinds.Wrapped(inner))
    assert template.render([USER], generation=False, args={}) == "<s>User: hi\n\n"
