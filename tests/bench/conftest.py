"""The tests of benches need torch."""

import pytest

pytest.importorskip("torch")
