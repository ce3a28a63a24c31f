"""Tests of the KV transfer over UCX."""

import importlib.util

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("ucxx") is None:
        for item in items:
            if "tests/kv/" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason="needs UCX: pip install ucxx-cu13==0.52.0"))
