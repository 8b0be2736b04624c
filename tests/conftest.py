"""Settings and fixtures of all tests.

JAX is told to use the CPU before its first backend comes up: compiling for a GPU that isn't here needs that.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("JAXREMAT_JOBS", "1")  # the processes of tests fill the cores

import re
import signal
import sys
from collections.abc import Iterator

import jax
import pytest

from jaxremat.chips.target import Target, load_target
from jaxremat.errors import MissingDependencyError
from tests.tiers import only_fast
from tests.user_files import Write, in_folder

pytest.register_assert_rewrite("tests.equality", "tests.program_checks", "tests.small_models")
jax.config.update("jax_numpy_dtype_promotion", "standard")
jax.config.update("jax_debug_key_reuse", False)


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="also run the tests marked full")


#: Files marked any_jax as a whole: no version of JAX changes processes, files, pages, or the planner's arithmetic. What the
#: commands print is made of what other files test on both lines.
ANY_JAX = set(
    """
    test_batch test_confirm test_doctor test_doctor_checks test_errors test_experiments test_files test_former
    test_gpu_check test_headroom test_kill_sweep test_layering test_page test_page_file test_peer test_plan
    test_plan_optimal test_policy_errors test_process test_savings test_store test_suggestions test_sweep test_truth
    test_units test_watch test_load test_source test_model_arguments test_explain test_apart test_levers test_run
    test_outputs test_auto test_buckets test_processes test_step test_experts test_calibration test_host_slices test_unrolled
    test_shared_budget test_interrupt test_plan_arguments test_train_page test_load_models test_signals test_screen
    test_named_files test_values test_faults test_pages test_docs test_claims test_lengths test_lint_mesh
    test_recomputed_flops test_mix test_expert_axis test_train test_given_model test_workload test_model test_samples
    test_session test_published test_pytest_plugin test_user_code
    """.split()  # noqa: SIM905
)


def pytest_ignore_collect(collection_path, config):
    """Leaves files whose tests are all of the full tier out of the fast one: the imports of some take seconds."""
    if config.getoption("--all") or not collection_path.name.startswith("test_"):
        return None
    return True if re.search(r"^pytestmark = .*mark\.full", collection_path.read_text(), re.MULTILINE) else None


def pytest_itemcollected(item):
    if item.path.stem in ANY_JAX:
        item.add_marker(pytest.mark.any_jax)


@pytest.hookimpl(trylast=True)  # the plugin of snapshots must have seen the deselected tests, or it counts theirs as unused
def pytest_collection_modifyitems(config, items):
    if not config.getoption("--all"):
        full = [item for item in items if "full" in item.keywords]
        config.hook.pytest_deselected(items=full)
        items[:] = [item for item in items if "full" not in item.keywords]


@pytest.fixture(autouse=True)
def fast_tier(request, monkeypatch):
    """Fails a test without the marker `full` that belongs to the full tier (`tests/tiers.py`)."""
    if "full" in request.keywords:
        yield
    else:
        with only_fast(monkeypatch):
            yield


@pytest.fixture(autouse=True, scope="session")
def hear_ctrl_c():
    """A shell's background job ignores SIGINT, and so would each process that a test starts and interrupts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def own_path():
    """A user's model that a test loads puts its folder on `sys.path`, where the next test must not find it."""
    path = list(sys.path)
    yield
    sys.path[:] = path


@pytest.fixture(autouse=True, scope="session")
def cache_home(tmp_path_factory):
    """Tests have a cache folder of their own, which is empty at first. What XLA compiled is shared by all of xdist's workers."""
    home = tmp_path_factory.mktemp("cache")
    base = tmp_path_factory.getbasetemp()
    compiled = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiled"
    compiled.mkdir(exist_ok=True)
    (home / "jaxremat").mkdir()
    (home / "jaxremat" / "compiled").symlink_to(compiled)
    os.environ["XDG_CACHE_HOME"] = str(home)


@pytest.fixture(scope="session")
def h100() -> Target:
    """The default deviceless target; a test that needs it is skipped, naming the missing wheel, without the aot extra."""
    try:
        return load_target("h100-80gb")
    except MissingDependencyError as error:
        if os.environ.get("CI"):
            raise  # CI installs the extra, so that there a missing piece is a failure
        pytest.skip(str(error))


@pytest.fixture
def write(tmp_path, monkeypatch) -> Iterator[Write]:
    """Writes a user's file, `write("train.py", text)`, into a folder that is the current one."""
    monkeypatch.chdir(tmp_path)
    with in_folder(tmp_path) as write:
        yield write
