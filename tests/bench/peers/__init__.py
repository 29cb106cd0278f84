"""The peers benchmark in parts. `drive_*` run in the peers' own environments; the rest runs in the project's."""
