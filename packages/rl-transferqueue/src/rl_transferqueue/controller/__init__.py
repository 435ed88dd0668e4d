"""The controller process: sessions, requests for rows and memory, and the bookkeeping
behind them."""
