import itertools
import math

import pytest
import torch
from toys import chi_square_p, slow_law
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from drafters.decoding.sampling import check_sampling, law, race, sample
from drafters.recipe import Sampling

torch.set_num_threads(1)

SETTINGS = [
    Sampling(temperature=0.0),
    Sampling(temperature=1.0),
    Sampling(temperature=0.5),
    Sampling(temperature=1.0, top_p=0.8),
    Sampling(temperature=1.0, top_k=3),
    Sampling(temperature=2.0, top_k=6, top_p=0.7),
    Sampling(temperature=0.7, min_p=0.2),
    Sampling(temperature=1.5, top_k=7, top_p=0.9, min_p=0.1),
]


@pytest.mark.parametrize("sampling", SETTINGS)
def test_law_is_the_slow_one(sampling):
    logits = 2 * torch.randn(3, 4, 9, generator=torch.Generator().manual_seed(1))
    expected = torch.tensor([[slow_law(row.tolist(), sampling) for row in rows] for rows in logits])
    assert torch.allclose(law(logits, sampling), expected, atol=1e-6)


@pytest.mark.parametrize("sampling", [s for s in SETTINGS if s.temperature > 0])
def test_law_is_that_of_transformers_generate(sampling):
    config = LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    model = LlamaForCausalLM(config)
    settings = GenerationConfig(
        do_sample=True,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p or None,
    )
    model._prepare_special_tokens(settings)
    processors = model._get_logits_processor(settings, input_ids_seq_length=1)
    logits = 2 * torch.randn(5, 9, generator=torch.Generator().manual_seed(2))
    expected = processors(torch.zeros(5, 1, dtype=torch.long), logits.clone()).softmax(-1)
    assert torch.equal(law(logits, sampling), expected)


def test_law_is_float32_and_one_dimensional_logits_do():
    probs = law(torch.tensor([0.0, 1.0, 2.0], dtype=torch.bfloat16), Sampling(temperature=1.0, top_k=2, top_p=0.99))
    assert probs.dtype == torch.float32 and probs.shape == (3,)
    assert probs[0] == 0 and math.isclose(float(probs.sum()), 1, rel_tol=1e-6)


def test_race_draws_without_replacement():
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])
    pairs = race(probs.expand(100_000, 5), torch.Generator().manual_seed(3)).topk(2).indices
    expected = torch.zeros(5, 5, dtype=torch.float64)
    for i, j in itertools.permutations(range(5), 2):
        expected[i, j] = probs[i] * probs[j] / (1 - probs[i])
    assert chi_square_p(pairs, expected.flatten()) > 1e-4
    assert chi_square_p(pairs.sort(1).values, expected.flatten()) < 1e-4


def test_sample_of_a_certain_token():
    probs = torch.eye(4)[[2, 0, 3]]
    assert sample(probs, torch.Generator().manual_seed(0)).tolist() == [2, 0, 3]


@pytest.mark.parametrize(
    "bad", [dict(temperature=-0.1), dict(top_k=-1), dict(top_p=0.0), dict(top_p=1.1), dict(min_p=-0.1), dict(min_p=2.0)]
)
def test_settings_out_of_range(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        check_sampling(Sampling(**bad))
