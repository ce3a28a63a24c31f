"""What every policy, engine and judge owes the mesh, as tests that run against any of them.

policy    `PolicyConformance`
engine    `EngineConformance`
judge     `JudgeConformance`

A test module subclasses one of these, says what is to be tested, and pytest collects the tests; see docs/plugins.md.
Needs `pip install 'penstock[testing]'`. Penstock tests its own policies, engines and judges with them.
"""

import pytest

pytest.register_assert_rewrite("penstock.testing.engine", "penstock.testing.judge", "penstock.testing.policy")
