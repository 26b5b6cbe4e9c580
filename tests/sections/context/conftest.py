import pytest

from dask_p2p.plans.ranks import RankGrid
from dask_p2p.sections import Context


@pytest.fixture
def alone():
    """The context of the only rank."""
    return Context(RankGrid.at_most(((3,),), 1))
