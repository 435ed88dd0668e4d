"""Ray on this machine for one run: its servers, and worker processes forked from one template."""
