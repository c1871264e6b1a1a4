"""Settings files of other systems become ours, by one table of keys for each system. Text in, text out."""

from mindspeed_asyncflow.migration.convert import SYSTEMS, Migrated, migrate

__all__ = ["SYSTEMS", "Migrated", "migrate"]
