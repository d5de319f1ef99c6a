"""What is refused before it is queued: requests that could never be served."""

from __future__ import annotations

from foretell.sequence import SamplingParams


def check_request(
    ids: list[int],
    params: SamplingParams,
    *,
    vocab_size: int,
    max_model_len: int,
    end_ids: frozenset[int],
) -> None:
    """Checks a prompt and its parameters against the model.

    Args:
        ids: the prompt.
        end_ids: the model's own end-of-text ids.

    Raises:
        ValueError: naming the field, the value and what is legal.
    """
    if not ids:
        raise ValueError("the prompt is empty: give at least one token")
    for name, tokens in (
        ("prompt", ids),
        ("logit_bias", params.logit_bias or ()),
        ("bad_token_ids", params.bad_token_ids),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("stop_token_ids", params.stop_token_ids),
    ):
        for token in tokens:
            if not 0 <= token < vocab_size:
                raise ValueError(
                    f"{name}: token id {token} is not in the vocabulary (0 to {vocab_size - 1})"
                )
    if len(ids) >= max_model_len:
        raise ValueError(
            f"the prompt has {len(ids)} tokens and max_model_len is {max_model_len}: at least one "
            "token must fit behind it; shorten the prompt or raise max_model_len"
        )
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        if count is not None and count > vocab_size:
            raise ValueError(f"{name}={count}: the vocabulary has {vocab_size} tokens")
    if params.allowed_token_ids is not None:
        left = set(params.allowed_token_ids) - set(params.bad_token_ids)
        if not left:
            raise ValueError("allowed_token_ids: every one of them is in bad_token_ids too")
        own = frozenset[int]() if params.ignore_eos else end_ids
        ends = own | set(params.stop_token_ids)
        if params.min_tokens and left <= ends:
            raise ValueError(
                f"min_tokens={params.min_tokens}: allowed_token_ids leaves only tokens that end "
                "the answer"
            )
    elif len(set(params.bad_token_ids)) >= vocab_size:
        raise ValueError("bad_token_ids: every token of the vocabulary is in it")
