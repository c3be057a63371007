"""Would catch: a field that a later vLLM takes and `terrace serve` has never heard of."""

from pathlib import Path

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest, StreamOptions

# A test of the program compares this page with its table of fields.
PAGE = (Path(__file__).resolve().parents[2] / "docs/reference/api.md").read_text()


@pytest.mark.parametrize("request_type", [ChatCompletionRequest, CompletionRequest])
def test_every_field_of_vllm_is_decided_upon(request_type: type):
    missing = [name for name in request_type.model_fields if f"`{name}" not in PAGE]
    assert missing == [], "give each a rule in src/openai/fields.cc"


def test_stream_options_of_vllm_are_known():
    known = {"include_usage", "continuous_usage_stats"}
    assert set(StreamOptions.model_fields) == known, "teach ReadStreaming in src/openai/parse.cc the new ones"
