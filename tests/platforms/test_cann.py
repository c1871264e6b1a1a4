from mindspeed_asyncflow.platforms import cann


def install(folder, version, arch="aarch64"):
    file = folder / f"{arch}-linux" / "ascend_toolkit_install.info"
    file.parent.mkdir(parents=True)
    file.write_text(f"package_name=Ascend-cann-toolkit\nversion={version}\ninnerversion=V100\narch={arch}\n")


def test_the_toolkit_is_the_one_that_the_environment_names(tmp_path):
    install(tmp_path / "cann-9.1.0", "9.1.0")
    install(tmp_path / "ascend-toolkit" / "latest", "8.5.1", "x86_64")
    assert cann.cann_version({"ASCEND_HOME_PATH": str(tmp_path / "cann-9.1.0")}) == "9.1.0"
    assert cann.cann_version({"ASCEND_TOOLKIT_HOME": str(tmp_path / "ascend-toolkit" / "latest")}) == "8.5.1"
    assert cann.cann_version({}) == ""
    assert cann.cann_version({"ASCEND_HOME_PATH": str(tmp_path / "gone")}) == ""


def test_a_toolkit_in_its_usual_place_is_found_without_an_environment(tmp_path):
    assert cann.installed_cann(tmp_path) == ""
    install(tmp_path / "ascend-toolkit" / "latest", "8.5.1")
    assert cann.installed_cann(tmp_path) == "8.5.1"
    install(tmp_path / "cann", "9.1.0")
    assert cann.installed_cann(tmp_path) == "9.1.0"


def test_the_driver_says_its_version(tmp_path):
    assert cann.driver_version(tmp_path) == ""
    (tmp_path / "driver").mkdir()
    (tmp_path / "driver" / "version.info").write_text("Version=25.5.2\nascendhal_version=7.35.23\n")
    assert cann.driver_version(tmp_path) == "25.5.2"
