"""The engines that ship with the package; see rl_ckpt_engine.registry for how a name becomes a class."""
