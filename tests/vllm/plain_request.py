"""A request of vLLM, as far as the connector looks at it."""

from types import SimpleNamespace


def plain_request(request_id: str, token_ids: list[int], **more: object) -> SimpleNamespace:
    """Tokens and nothing else, but for what `more` says."""
    request = SimpleNamespace(
        request_id=request_id,
        all_token_ids=token_ids,
        num_tokens=len(token_ids),
        cache_salt=None,
        lora_request=None,
        mm_features=[],
        prompt_embeds=None,
        pooling_params=None,
        skip_reading_prefix_cache=False,
        resumable=False,
    )
    vars(request).update(more)
    return request
