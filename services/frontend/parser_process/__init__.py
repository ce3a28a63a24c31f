"""The process beside this frontend in which vLLM renders chats and reads answers that the frontend cannot."""
