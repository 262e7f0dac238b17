"""Numbers out of a scrape."""


def of(samples: dict[str, float], name: str, **labels: str) -> float:
    """The sum of a metric's samples with these labels."""
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    found = (key for key in samples if key.partition("{")[0] == name and all(one in key for one in wanted))
    return sum(samples[key] for key in found)


def within_bucket(samples: dict[str, float], name: str, share: float, value: float) -> bool:
    """Whether a quantile lies in the bucket of the histogram that holds it, within the 5 % of a bin."""
    bounds: dict[float, float] = {}
    for key, count in samples.items():
        if key.startswith(f"{name}_bucket{{") and 'workload="interactive"' in key:
            bound = float(key.split('le="')[1].split('"')[0])
            bounds[bound] = bounds.get(bound, 0) + count
    wanted = share * bounds[float("inf")]
    upper = min(bound for bound, count in bounds.items() if count >= wanted)
    lower = max((bound for bound, count in bounds.items() if count < wanted), default=0.0)
    return lower * 0.95 <= value <= upper * 1.05
