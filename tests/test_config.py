import os

import dask
import dask.array as da
import pytest
import yaml

import dask_p2p
from dask_p2p.config import checked_options, options, transport_classes
from dask_p2p.errors import ConfigError
from tests.support import output_of

jsonschema = pytest.importorskip("jsonschema")

HERE = os.path.dirname(dask_p2p.__file__)


def load(name):
    with open(os.path.join(HERE, name)) as file:
        return yaml.safe_load(file)


def leaves(tree, path=()):
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, (*path, name))
        else:
            yield (*path, name)


def test_the_schema_describes_every_default_and_refuses_other_options():
    schema, defaults = load("p2p-schema.yaml"), load("p2p.yaml")
    jsonschema.validate(defaults, schema)
    with pytest.raises(jsonschema.ValidationError, match="modus"):
        jsonschema.validate({"p2p": {"attempts": 3, "modus": 1}}, schema)
    for path in leaves(defaults):
        node = schema
        for name in path:
            node = node["properties"][name]
        assert node["description"].strip(), path


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("producer-streams", "al", "expected one of any, default"),
        ("attempts", 0, "at least 1"),
        ("attempts", True, "at least 1"),
        ("transports.order", ["ipc", "pigeon"], "from ipc, cma, ucx, pinned, comm"),
        ("transports.order", "ipc", "from ipc, cma, ucx, pinned, comm"),
        ("transports.order", None, "expected auto, or a list"),
        ("transports.order", [], "at least one name"),
        ("transports.ucx.allow-unencrypted", "perhaps", "true or false"),
        ("transports.part-bytes", "0 B", "at least one byte"),
        ("transports.part-bytes", "much", "like '16 MiB'"),
        ("timeouts.request", -1, "at least 1 ms"),
        ("timeouts.request", 0, "at least 1 ms"),
        ("memory.retain-outputs", -1, "at least zero"),
        ("memory.retain-outputs", "soon", "like '50 ms'"),
    ],
)
def test_a_wrong_option_is_named(name, value, expected):
    with dask.config.set({f"p2p.{name}": value}), pytest.raises(ConfigError) as caught:
        options()
    message = str(caught.value)
    assert f"p2p.{name} is {value!r}" in message
    assert expected in message


def test_the_least_values_are_taken():
    values = {"attempts": 1, "timeouts.request": "1 ms", "memory.retain-outputs": 0}
    with dask.config.set({f"p2p.{name}": value for name, value in values.items()}):
        assert options().request_timeout_s == 1e-3


@pytest.mark.parametrize(
    ("setting", "unknown", "nearest"),
    [
        ({"p2p.transport.order": ["comm"]}, "p2p.transport.order", "p2p.transports.order"),
        ({"p2p.staging-limit": "1 GiB"}, "p2p.staging-limit", "p2p.memory.staging-limit"),
        (
            {"p2p.transports.partbytes": "1 MiB"},
            "p2p.transports.partbytes",
            "p2p.transports.part-bytes",
        ),
        ({"p2p": {"attempts": {"most": 3}}}, "p2p.attempts.most", "p2p.attempts"),
        ({"p2p.memory": "1 GiB"}, "p2p.memory", "p2p.memory.staging-limit"),
        ({"p2p": "sync"}, "p2p", "p2p."),
    ],
)
@pytest.mark.parametrize("operation", [dask_p2p.transpose, dask_p2p.estimate])
def test_a_misspelt_option_is_named_with_the_nearest(setting, unknown, nearest, operation):
    with dask.config.set(setting), pytest.raises(ConfigError) as caught:
        operation(da.ones((4, 4), chunks=2))
    assert f"got {unknown}; the nearest is {nearest}" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("p2p.transports.comm.part-bytes", "p2p.transports.part-bytes sets the size"),
        ("p2p.transports.ucx.host_part_bytes", "p2p.transports.part-bytes sets the size"),
        ("p2p.transports.ucx.parts-in-flight", "set p2p.transports.part-bytes"),
        ("p2p.timeouts.backoff", "the first pause is 50 ms; p2p.attempts bounds"),
        ("p2p.passes", "p2p.groups bounds"),
    ],
)
def test_an_option_of_an_earlier_version_names_what_there_is_now(name, remedy):
    with dask.config.set({name: 1}), pytest.raises(ConfigError, match="which earlier versions had"):
        dask_p2p.transpose(da.ones((4, 4), chunks=2))
    with dask.config.set({name: 1}), pytest.raises(ConfigError, match=remedy):
        checked_options()


def test_one_size_of_parts_for_all_transports():
    with dask.config.set({"p2p.transports.part-bytes": "5 kB"}):
        chosen = options()
    for transport in transport_classes().values():
        if transport.name != "ipc":
            assert transport.footprint(chosen, "numpy").part_bytes == 5000


def test_names_with_underscores_and_empty_sections_are_none_misspelt():
    with dask.config.set(
        {"p2p": {"producer_streams": "default", "memory": None, "transports": {}}}
    ):
        chosen = checked_options()
    assert chosen.producer_streams == "default"
    assert chosen.staging_limit_bytes == 2 * 2**30, "what a section lacks has its default"
    assert chosen.order("numpy") == ("cma", "comm")


def test_workers_take_a_configuration_for_another_version():
    with dask.config.set({"p2p.transports.carrier-pigeon.range": 3}):
        assert options().attempts == 8


def test_defaults_are_there_after_importing_the_package_and_environment_variables_are_read():
    program = (
        "import dask_p2p, dask; print(*map(dask.config.get, ('p2p.fuse', 'p2p.groups')));"
        "import dask_p2p.transports; from dask_p2p.config import options;"
        "print(options().groups, options().attempts)"
    )
    output = output_of("-c", program, DASK_P2P__GROUPS="2", DASK_P2P__ATTEMPTS="3")
    assert output.split() == ["off", "2", "2", "3"]


def test_options_are_read_again_after_a_change():
    for value in (3, 4):
        with dask.config.set({"p2p.attempts": value}):
            assert checked_options().attempts == value
            assert checked_options() is checked_options()
    with dask.config.set({"p2p.attempts": 1}):
        assert checked_options().attempts == 1
        # Python counts 1 and True as equal.
        with dask.config.set({"p2p.attempts": True}), pytest.raises(ConfigError):
            checked_options()
