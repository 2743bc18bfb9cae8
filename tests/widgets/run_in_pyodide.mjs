// Runs unit tests inside Pyodide, the Python of the published page, on Node.
// node run_in_pyodide.mjs PYODIDE_DIR REPO SITE_PACKAGES TEST_FOLDER...   (exit code: pytest's)
import fs from "node:fs";
import path from "node:path";
import { pathToFileURL } from "node:url";

const [pyodideDir, repo, site, ...folders] = process.argv.slice(2);
const { loadPyodide } = await import(pathToFileURL(path.join(pyodideDir, "pyodide.mjs")));
const pyodide = await loadPyodide({ indexURL: pyodideDir + path.sep, env: { PYTEST_DISABLE_PLUGIN_AUTOLOAD: "1", PYTHONDONTWRITEBYTECODE: "1" } });
pyodide.mountNodeFS("/repo", repo);
// pytest and what it imports are pure Python, so the copies installed for this machine's Python serve here too
for (const name of ["pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments"])
  pyodide.mountNodeFS(`/site/${name}`, path.join(site, name));
pyodide.FS.writeFile("/site/py.py", fs.readFileSync(path.join(site, "py.py")));
pyodide.globals.set("folders", pyodide.toPy(folders));
process.exitCode = pyodide.runPython(`
import os, sys
sys.path[:0] = ["/repo", "/site"]
os.chdir("/repo")
import pytest


class NotInAPage:
    """Skips what a page does not have: third-party packages and subprocesses."""

    @staticmethod
    def reason(error):
        if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("kvlab"):
            return f"needs {error.name}, which the page does not have"
        if isinstance(error, OSError) and "does not support processes" in str(error):
            return "starts a process, which a page cannot"
        return ""

    def pytest_collection_modifyitems(self, config, items):
        # Random schedules with their first seed only: what differs here is the interpreter, not what they draw.
        more = [i for i in items if hasattr(i, "callspec") and i.callspec.params.get("seed", 0) > 0]
        config.hook.pytest_deselected(items=more)
        items[:] = [i for i in items if i not in more]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        try:
            return (yield)
        except (ModuleNotFoundError, OSError) as error:
            if reason := self.reason(error):
                pytest.skip(reason)
            raise

    @pytest.hookimpl(wrapper=True)
    def pytest_pycollect_makemodule(self, module_path, parent):
        module = yield
        load = module._getobj

        def importing():
            try:
                return load()
            except pytest.Collector.CollectError as error:
                cause = error.__cause__
                if isinstance(cause, ImportError) and (reason := self.reason(cause)):
                    pytest.skip(reason, allow_module_level=True)
                raise

        module._getobj = importing
        return module


int(pytest.main(["-o", "addopts=", "-q", "-rs", "-p", "no:cacheprovider", "--rootdir=/repo", "-c", "/repo/pyproject.toml", *folders], plugins=[NotInAPage()]))
`);
