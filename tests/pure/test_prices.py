"""What tokens cost: exact catalogue arithmetic and the formats it is read from."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill import prices, providers
from tidemill.errors import SettingsError
from tidemill.prices import Catalogue, ModelPrice, Rate
from tidemill.types import Usage

TOML = """
currency = "EUR"
version = "2026-11"

[models.big]
input = 2.50
cached_input = "1.25"
output = 10

[models.big.batch]
input = 1.25
output = 5

[models."local/small"]
input = "0.000001"
"""

LITELLM = {
    "sample_spec": {"input_cost_per_token": 0.0, "mode": "one of: chat, embedding"},
    "gpt-x": {
        "input_cost_per_token": 1.5e-07,
        "input_cost_per_token_batches": 7.5e-08,
        "output_cost_per_token": 6e-07,
        "output_cost_per_token_batches": 3e-07,
        "cache_read_input_token_cost": 7.5e-08,
        "litellm_provider": "openai",
        "mode": "chat",
    },
    "azure/gpt-x": {"input_cost_per_token": 1.65e-07, "output_cost_per_token": 6.6e-07},
    "picture": {"output_cost_per_image": 0.04, "mode": "image_generation"},
    "thirds": {"input_cost_per_token": 3.3333333333333335e-13, "output_cost_per_token": None},
    "claude-x": {
        "input_cost_per_token": 3e-06,
        "input_cost_per_token_above_200k_tokens": 6e-06,
        "input_cost_per_token_batches": 1.5e-06,
        "cache_read_input_token_cost": 3e-07,
        "cache_read_input_token_cost_batches": 1.5e-07,
        "output_cost_per_token": 1.5e-05,
        "output_cost_per_token_batches": 7.5e-06,
    },
    "qwen-x": {
        "litellm_provider": "dashscope",
        "mode": "chat",
        "tiered_pricing": [
            {"input_cost_per_token": 5e-08, "output_cost_per_token": 4e-07, "range": [0, 256000.0]},
            {"input_cost_per_token": 2.5e-07, "output_cost_per_token": 2e-06, "range": [256000.0]},
        ],
    },
    "wandb/kimi-x": {"input_cost_per_token": 0.135, "output_cost_per_token": 0.4},
}

rates = st.builds(
    Rate,
    input=st.integers(0, 10**9),
    cached=st.integers(0, 10**9),
    output=st.integers(0, 10**9),
)


@st.composite
def usages(draw: st.DrawFn) -> Usage:
    input = draw(st.integers(0, 10**7))
    output = draw(st.integers(0, 10**7))
    return Usage(
        input=input,
        cached=draw(st.integers(0, input)),
        output=output,
        reasoning=draw(st.integers(0, output)),
    )


def _write(path: Path, content: str) -> Path:
    path.write_text(content, encoding="utf-8")
    return path


class TestArithmetic:
    @given(rates, usages())
    def test_a_row_is_its_parts_rounded_up_once(self, rate: Rate, usage: Usage) -> None:
        """The cost is the exact sum of the three parts, and less than a micro-unit above it."""
        exact = (
            Decimal(usage.input - usage.cached) * rate.input
            + Decimal(usage.cached) * rate.cached
            + Decimal(usage.output) * rate.output
        ) / 10**6
        assert 0 <= rate.cost(usage) - exact < 1

    @given(rates, usages(), usages())
    def test_two_rows_cost_their_sum_within_one_unit(self, rate: Rate, a: Usage, b: Usage) -> None:
        """Booking tokens in two rows instead of one changes the bill by one unit at most."""
        both = Usage(
            input=a.input + b.input, cached=a.cached + b.cached, output=a.output + b.output
        )
        assert 0 <= rate.cost(a) + rate.cost(b) - rate.cost(both) <= 1

    @given(rates, usages(), st.integers(0, 1000), st.integers(0, 1000))
    def test_more_tokens_never_cost_less(
        self, rate: Rate, usage: Usage, fresh: int, output: int
    ) -> None:
        """The cost grows with every kind of token."""
        more = Usage(input=usage.input + fresh, cached=usage.cached, output=usage.output + output)
        assert rate.cost(more) >= rate.cost(usage)

    @given(rates, usages())
    def test_reasoning_is_part_of_the_output(self, rate: Rate, usage: Usage) -> None:
        """Reasoning tokens are in the output count and are not charged a second time."""
        without = Usage(input=usage.input, cached=usage.cached, output=usage.output)
        assert rate.cost(usage) == rate.cost(without)

    @given(st.integers(0, 10**15))
    def test_an_amount_reads_back_as_it_was_shown(self, amount: int) -> None:
        """Showing an amount loses nothing."""
        assert prices.micro(prices.shown(amount)) == amount

    @pytest.mark.parametrize("text", ["", "ten", "-1", "NaN", "Infinity", "0.0000001"])
    def test_what_is_no_amount_is_refused(self, text: str) -> None:
        """Negative, endless and too fine amounts are no amounts."""
        with pytest.raises(ValueError, match=r"amount|millionth"):
            prices.micro(text)


class TestCatalogue:
    def test_a_toml_file_gives_exact_rates(self, tmp_path: Path) -> None:
        """Numbers and texts are read as decimals; a missing cached rate is the input rate."""
        catalogue = prices.load(_write(tmp_path / "prices.toml", TOML))
        assert catalogue.currency == "EUR"
        assert catalogue.version.startswith("2026-11+")
        assert catalogue.models["big"] == ModelPrice(
            standard=Rate(input=2_500_000, cached=1_250_000, output=10_000_000),
            batch=Rate(input=1_250_000, cached=1_250_000, output=5_000_000),
        )
        assert catalogue.models["local/small"].standard == Rate(input=1, cached=1, output=0)

    def test_the_same_content_in_json_is_the_same_version(self, tmp_path: Path) -> None:
        """A version names the prices, not the format that they were written in."""
        as_json = json.dumps(
            {
                "currency": "EUR",
                "version": "2026-11",
                "models": {
                    "local/small": {"input": "0.000001"},
                    "big": {
                        "input": 2.5,
                        "cached_input": 1.25,
                        "output": 10,
                        "batch": {"input": 1.25, "output": 5},
                    },
                },
            }
        )
        one = prices.load(_write(tmp_path / "prices.toml", TOML))
        two = prices.load(_write(tmp_path / "prices.json", as_json))
        assert one == two

    def test_a_changed_price_is_a_changed_version(self) -> None:
        """Rows booked before and after a change of price can be told apart."""
        one = prices.parse({"version": "1", "models": {"m": {"input": 1}}})
        two = prices.parse({"version": "1", "models": {"m": {"input": 2}}})
        assert one.version != two.version

    def test_a_litellm_map_is_imported(self, tmp_path: Path) -> None:
        """Prices per token, batch and cached rates are taken; images and the sample are not."""
        catalogue = prices.load(_write(tmp_path / "map.json", json.dumps(LITELLM)))
        assert set(catalogue.models) == set(LITELLM) - {"sample_spec", "picture"}
        assert catalogue.models["gpt-x"] == ModelPrice(
            standard=Rate(input=150_000, cached=75_000, output=600_000),
            batch=Rate(input=75_000, cached=75_000, output=300_000),
        )
        # Finer than a rate can be: up to the next.
        assert catalogue.models["thirds"].standard.input == 1
        assert catalogue.models["claude-x"] == ModelPrice(
            standard=Rate(input=3_000_000, cached=300_000, output=15_000_000),
            batch=Rate(input=1_500_000, cached=150_000, output=7_500_000),
        )
        # Rates by the length of the prompt: the first.
        assert catalogue.models["qwen-x"].standard == Rate(
            input=50_000, cached=50_000, output=400_000
        )

    def test_a_wrong_rate_of_a_litellm_map_does_not_stop_the_start(self, tmp_path: Path) -> None:
        """The map has had rates per token that were meant per million: they cost what can be
        booked, rather than nothing."""
        catalogue = prices.load(_write(tmp_path / "map.json", json.dumps(LITELLM)))
        rate = catalogue.models["wandb/kimi-x"].standard
        most = 100_000 * prices.MILLION
        assert rate == Rate(input=most, cached=most, output=most)
        assert rate.cost(Usage(input=2**24, output=2**24)) < 2**63 // prices.MILLION

    def test_a_model_without_a_batch_rate_costs_its_standard_rate(self) -> None:
        """An unpriced batch is over- rather than under-charged."""
        catalogue = prices.parse({"models": {"m": {"input": 3, "output": 4}}})
        usage = Usage(input=1_000_000, output=1_000_000)
        assert catalogue.cost(usage, "m", execution="p", tier="batch") == 7_000_000

    def test_a_local_model_is_free_unless_it_is_priced_as_local(self) -> None:
        """A provider's price does not charge for a local model of the same name."""
        usage = Usage(input=1_000_000)
        catalogue = prices.parse({"models": {"m": {"input": 3}, "local/n": {"input": 2}}})
        assert catalogue.cost(usage, "m") == 0
        assert catalogue.cost(usage, "n") == 2_000_000
        assert catalogue.cost(usage, "n", execution="openai") == 0

    def test_a_provider_is_found_by_name_then_kind_then_model(self) -> None:
        """The narrowest name of a price wins."""
        catalogue = prices.parse(
            {"models": {"m": {"input": 1}, "azure/m": {"input": 2}, "sweden/m": {"input": 3}}}
        )
        known = Catalogue(models=catalogue.models, kinds={"sweden": "azure", "france": "azure"})
        usage = Usage(input=1_000_000)
        assert known.cost(usage, "m", execution="sweden") == 3_000_000
        assert known.cost(usage, "m", execution="france") == 2_000_000
        assert known.cost(usage, "m", execution="elsewhere") == 1_000_000

    def test_a_model_is_found_by_its_providers_name_where_ours_has_no_price(
        self, tmp_path: Path
    ) -> None:
        """A list of everybody's prices knows no alias; a price of our name wins, and a model that
        runs here costs nothing by it."""
        east = {
            "name": "east",
            "kind": "azure",
            "base_url": "https://east.example",
            "api_key_env": "EAST_KEY",
            "models": {
                "big": {"batch": "gpt-x-batch", "standard": "gpt-x"},
                "gpt-x": {"batch": "other"},
                "own": {"standard": "mine"},
            },
        }
        file = prices.load(_write(tmp_path / "map.json", json.dumps(LITELLM)))
        known = prices.with_providers(file, providers.parse([east]))
        million = Usage(input=1_000_000)
        assert known.cost(million, "big", execution="east") == 165_000
        assert known.cost(million, "gpt-x", execution="east", tier="batch") == 165_000
        # A name for batches that nobody has a price of: the same model's other name.
        assert known.cost(million, "big", execution="east", tier="batch") == 165_000
        assert known.quote("own", execution="east") == prices.UNPRICED
        assert known.cost(million, "big") == known.cost(million, "gpt-x") == 0
        dear = prices.parse({"models": {"big": {"input": 7}, "gpt-x": {"input": 1}}})
        both = prices.with_providers(dear, providers.parse([east]))
        assert both.cost(million, "big", execution="east") == 7_000_000

    def test_the_providers_own_prices_count_where_no_file_has_one(self) -> None:
        """A price in a provider's settings is used, and a price file wins over it."""
        given_ = providers.parse(
            [
                {
                    "name": "east",
                    "kind": "openai",
                    "api_key_env": "EAST_KEY",
                    "models": {
                        "m": {"batch": "m", "price": {"input": 2, "output": 8, "batch_input": 1}},
                        "n": {"batch": "n", "price": {"input": 2, "output": 8}},
                    },
                }
            ]
        )
        file = prices.parse({"models": {"east/n": {"input": 7}}})
        catalogue = prices.with_providers(file, given_)
        million = Usage(input=1_000_000, output=1_000_000)
        assert catalogue.cost(million, "m", execution="east", tier="batch") == 9_000_000
        assert catalogue.cost(million, "n", execution="east") == 7_000_000
        assert catalogue.version != file.version

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            ("[]", "not a table of models"),
            ("{", "not JSON"),
            ("[" * 100_000, "not JSON"),
            ('{"models": {}}', "no prices"),
            ('{"models": {"m": 3}}', "'m' is not a table"),
            ('{"models": {"m": {"output": 3}}}', "has no 'input'"),
            ('{"models": {"m": {"input": -3}}}', "'input' of 'm'"),
            ('{"models": {"m": {"input": NaN}}}', "NaN is not a number"),
            ('{"models": {"m": {"input": 1e999999999}}}', "'input' of 'm'"),
            ('{"models": {"m": {"input": 0.0000001}}}', "finer than a millionth"),
            ('{"models": {"m": {"input": 1000000}}}', "is not a price"),
            ('{"models": {"m": {"input": true}}}', "not a number"),
            ('{"models": {"m": {"input": 1, "putput": 1}}}', "unknown field 'putput'"),
            ('{"models": {"m": {"input": 1}}, "curency": "EUR"}', "unknown field 'curency'"),
            ('{"m": {"input_cost_per_token": "x"}}', "'input_cost_per_token' of 'm'"),
            ('{"m": {"input_cost_per_token": -1}}', "'input_cost_per_token' of 'm'"),
            ('{"m": {"tiered_pricing": [3]}}', "no prices"),
        ],
    )
    def test_a_bad_file_is_one_sentence(self, tmp_path: Path, content: str, reason: str) -> None:
        """Whatever is wrong with a price file, the start stops with what and where."""
        path = _write(tmp_path / "prices.json", content)
        with pytest.raises(SettingsError, match=reason) as caught:
            prices.load(path)
        assert str(path) in str(caught.value)

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        """A price file that is not there stops the start."""
        with pytest.raises(SettingsError, match="Cannot read the price file"):
            prices.load(tmp_path / "none.toml")
