"""Fixtures of the tests of `hotsplit serve`, which load this module with pytest_plugins."""

import pytest
from serving import save_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("serve"))
