"""Answers from a target in this process, by transformers' own batched `generate`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerBase

from drafters.data.answers import TOO_LONG, Answer, NoAnswer, Question
from drafters.decoding.sampling import check_sampling, law, race
from drafters.decoding.stopping import Stopping
from drafters.recipe import Sampling
from drafters.target.hf import HFTarget

logger = logging.getLogger(__name__)


class LocalAnswerer:
    """Answers questions in batches, the short ones with the short ones; prompts are padded on the left.

    Args:
        target: any.
        tokenizer: the target's, with a chat template.
        sampling: temperature 0 is greedy. Other settings of the target's own generation config (penalties, say) don't count.
        max_new_tokens: most tokens of an answer; a question that leaves no room for so many is not asked.
        batch_size: most questions of a forward.

    Raises:
        ValueError: settings out of range, or a tokenizer without a chat template.
    """

    def __init__(
        self,
        target: HFTarget,
        tokenizer: PreTrainedTokenizerBase,
        *,
        sampling: Sampling,
        max_new_tokens: int,
        batch_size: int,
    ) -> None:
        check_sampling(sampling)
        for name, value in {"max_new_tokens": max_new_tokens, "batch_size": batch_size}.items():
            if value < 1:
                raise ValueError(f"{name} is {value}; expected at least 1")
        if not tokenizer.chat_template:
            raise ValueError(
                f"the tokenizer of {target.info.path} has no chat template, so it can't be asked; set one in its "
                "tokenizer_config.json"
            )
        self._target = target
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._batch_size = batch_size
        self._room = target.info.max_position_embeddings - max_new_tokens
        self._stopping = Stopping(target.info.eos_token_ids)
        self._config = _config(target, tokenizer, max_new_tokens)

    def __call__(self, questions: Sequence[Question]) -> list[Answer | NoAnswer]:
        """An answer to each.

        Raises:
            ValueError: the device has too little memory for a batch.
        """
        prompts = [self._encode(question) for question in questions]
        fitting = {i: prompt for i, prompt in enumerate(prompts) if not isinstance(prompt, NoAnswer)}
        found: dict[int, Answer | NoAnswer] = {i: p for i, p in enumerate(prompts) if isinstance(p, NoAnswer)}
        order = sorted(fitting, key=lambda i: len(fitting[i]), reverse=True)  # what needs most memory comes first
        for start in range(0, len(order), self._batch_size):
            batch = order[start : start + self._batch_size]
            new = self._generate([fitting[i] for i in batch], [questions[i].seed for i in batch])
            found.update({i: self._answer(tokens) for i, tokens in zip(batch, new, strict=True)})
        return [found[i] for i in range(len(questions))]

    def _encode(self, question: Question) -> list[int] | NoAnswer:
        try:
            rendered: Any = self._tokenizer.apply_chat_template(
                question.messages, add_generation_prompt=True, tokenize=True, return_dict=True
            )
        except TemplateError as error:
            logger.warning("the chat template refuses a conversation: %s", error)
            return NoAnswer("refused by the chat template")
        ids = list(rendered["input_ids"])
        return ids if len(ids) <= self._room else NoAnswer(TOO_LONG)

    def _generate(self, prompts: list[list[int]], seeds: list[int]) -> list[list[int]]:
        # row     pad pad p0 p1 p2 | a0 a1 eos pad ...
        # mask      0   0  1  1  1
        longest = max(map(len, prompts))
        pad = self._config.pad_token_id
        ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        device = self._target.device
        processors = LogitsProcessorList()
        if self._sampling.temperature > 0:
            processors.append(_Draw(self._sampling, seeds, device))
        try:
            output = self._target.model.generate(
                ids.to(device),
                attention_mask=mask.to(device),
                generation_config=self._config,
                logits_processor=processors,
            )
        except torch.cuda.OutOfMemoryError as error:
            raise ValueError(
                f"the device has too little memory for {len(prompts)} prompts of up to {longest} tokens; lower --batch-size "
                f"(got {self._batch_size}) and run the same command again: what is answered is kept"
            ) from error
        return output[:, longest:].tolist()

    def _answer(self, tokens: list[int]) -> Answer:
        count = self._stopping.cut([], tokens)
        text = self._tokenizer.decode(tokens if count is None else tokens[: count - 1], skip_special_tokens=True)
        assert isinstance(text, str)
        return Answer(text, count is None, count or len(tokens))


class _Draw(LogitsProcessor):
    """Draws each row's token with a generator of its own: the largest key of a race is a draw from the law.

    So a row's answer doesn't depend on the rows beside it, as it would with `generate`'s one generator.
    """

    def __init__(self, sampling: Sampling, seeds: Sequence[int], device: torch.device) -> None:
        self._sampling = sampling
        self._generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        probs = law(scores, self._sampling)
        return torch.stack([race(row, generator) for row, generator in zip(probs, self._generators, strict=True)])


def _config(target: HFTarget, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int) -> GenerationConfig:
    """Greedy, as `_Draw` does the drawing. Every setting is given: what is left out would come from the model's folder."""
    eos = list(target.info.eos_token_ids)
    pad = tokenizer.pad_token_id
    return GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        eos_token_id=eos or None,
        pad_token_id=pad if pad is not None else eos[0] if eos else 0,
        use_cache=True,
    )
