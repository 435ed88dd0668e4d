"""`uv run apps/ppo`."""

if __name__ == "__main__":
    from rl_app_ppo.cli.entry import main

    main()
