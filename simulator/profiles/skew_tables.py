"""Decode attention over contexts of two lengths, in the form that LLMServingSim publishes.

In llmservingsim_skew_CARD.csv.gz, of `n` requests `nb` have `kv_big` tokens of context and the others `kvs`.
`t_skew_us` is that batch's time, `t_mean_us` that of equal contexts, `pc` the prompt tokens computed beside them.
"""

from simulator.cost.catalogue.models import MODELS
from simulator.cost.fitted.unevenness import UnevenRow
from simulator.profiles.folder import ProfileFolder
from simulator.profiles.kernel_tables import card_of, is_model


def uneven_rows(folder: ProfileFolder, device: str) -> dict[str, list[UnevenRow]]:
    """All rows by the catalogue's name of their model; models that it does not have are left out. Raises
    `ConfigurationError` where there is no such table."""
    found: dict[str, list[UnevenRow]] = {}
    names: dict[str, str | None] = {}
    for row in folder.rows(f"llmservingsim_skew_{card_of(device)}"):
        published = row["model"]
        if published not in names:
            names[published] = next((name for name in MODELS if is_model(published, name)), None)
        name = names[published]
        if name is not None:
            found.setdefault(name, []).append(
                UnevenRow(
                    kv_heads=max(1, MODELS[name].kv_heads // int(row["tp"].removeprefix("tp"))),
                    requests=int(row["n"]),
                    longer=int(row["nb"]),
                    short_tokens=int(row["kvs"]),
                    long_tokens=int(row["kv_big"]),
                    has_prompt=int(row["pc"]) > 0,
                    equal_us=float(row["t_mean_us"]),
                    uneven_us=float(row["t_skew_us"]),
                )
            )
    return found
