"""Fixtures of the tests of texts, which load this module with pytest_plugins."""

import pytest

from hotsplit.runtime.text.template_process import TemplateProcess


@pytest.fixture(scope="module")
def process():
    process = TemplateProcess()
    yield process
    process.close()
