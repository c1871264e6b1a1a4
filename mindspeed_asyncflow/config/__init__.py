"""Settings of a run: schema, YAML and overrides, checks before a launch. Imports neither torch nor ray."""

from mindspeed_asyncflow.config.keys import KeyDoc, describe_keys
from mindspeed_asyncflow.config.load import dump_resolved, load_config, parse_config
from mindspeed_asyncflow.config.schema import Config

__all__ = ["Config", "KeyDoc", "describe_keys", "dump_resolved", "load_config", "parse_config"]
