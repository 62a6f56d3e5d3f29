"""What ends a request, however many tokens are taken at a time."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_tokenizer

from corral.rollout.engine import FinishReason, Sampling
from corral.rollout.engine_core import GenerationRequest

TOKENIZER = tiny_tokenizer()
A, B, C = TOKENIZER.convert_tokens_to_ids(["a", "b", "c"])
samplings = st.builds(
    Sampling,
    max_tokens=st.integers(1, 12),
    stop=st.sampled_from([(), ("ab",), ("ca", "bbb")]),
    stop_tokens=st.sampled_from([frozenset(), frozenset({C}), frozenset({B, C})]),
)


def new_request(sampling: Sampling) -> GenerationRequest:
    return GenerationRequest(np.array([A]), sampling, 0, None)  # type: ignore[arg-type]


@given(st.lists(st.sampled_from([A, B, C]), min_size=12, max_size=12), st.lists(st.integers(1, 8)), samplings)
def test_tokens_that_are_taken_together_end_it_where_they_would_one_by_one(
    tokens: list[int], sizes: list[int], sampling: Sampling
) -> None:
    one_by_one, together = new_request(sampling), new_request(sampling)
    for number, token in enumerate(tokens):
        if one_by_one.finish_reason is None:
            one_by_one.extend([token], [-float(number)], number, TOKENIZER)
    start = 0
    for size in [*sizes, len(tokens)]:
        if together.finish_reason is None:
            numbers = range(start, min(start + size, len(tokens)))
            together.extend(tokens[start : start + size], [-float(i) for i in numbers], size, TOKENIZER)
            start += size
    assert together.finish_reason is one_by_one.finish_reason is not None
    assert together.tokens == one_by_one.tokens
    assert together.logprobs == one_by_one.logprobs
    assert len(together.versions) == len(together.tokens)


@given(st.lists(st.sampled_from([A, B, C]), min_size=12, max_size=12), samplings)
def test_it_ends_with_the_first_token_that_is_a_reason(tokens: list[int], sampling: Sampling) -> None:
    request = new_request(sampling)
    request.extend(tokens, [0.0] * len(tokens), 3, TOKENIZER)
    reasons = []
    for num in range(1, sampling.max_tokens + 1):
        if tokens[num - 1] in sampling.stop_tokens:
            reasons.append((num, FinishReason.STOP_TOKEN))
        if any(TOKENIZER.decode(tokens[:num]).endswith(stop) for stop in sampling.stop):
            reasons.append((num, FinishReason.STOP_STRING))
    num, finish = (*reasons, (sampling.max_tokens, FinishReason.LENGTH))[0]
    assert (request.tokens, request.finish_reason, request.versions) == (tokens[:num], finish, [3] * num)


@given(
    st.text(alphabet="한국어안녕ไทยสวัสดี🐑🤠👨‍👩‍👧é", min_size=1, max_size=6), st.text(alphabet="abก한🐑 ", max_size=5)
)
def test_a_stop_string_whose_characters_are_several_tokens_is_found(stop: str, before: str) -> None:
    """A token is one byte here, and up to four of them make a character."""
    tokens = list((before + stop).encode())
    request = new_request(Sampling(max_tokens=200, stop=(stop,)))
    for token in [*tokens, *b"more"]:
        if request.finish_reason is None:
            request.extend([token], [0.0], 0, ByteTokenizer())
    assert request.finish_reason is FinishReason.STOP_STRING
    assert stop in bytes(request.tokens).decode()


class ByteTokenizer:
    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return bytes(tokens).decode(errors="replace")
