"""The laws that every method must obey; one line in a test tries them on your own method.

>>> from fedgist.methods import METHODS
>>> from fedgist.testing import check_laws
>>> check_laws(METHODS["local"](), only=("8",))
['8 inputs are not mutated']
"""

from fedgist.core.objectives.own_objective_check import check_objective
from fedgist.testing.laws import LAWS, Law, LawError, check_laws
from fedgist.testing.method_under_test import MethodUnderTest
from fedgist.testing.reduction import check_reduces_to

__all__ = [
    "LAWS",
    "Law",
    "LawError",
    "MethodUnderTest",
    "check_laws",
    "check_objective",
    "check_reduces_to",
]
