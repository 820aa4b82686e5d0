"""What the reference implementation and ours are both asked."""

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village at the edge of a great forest,",
    "def fibonacci(n):\n    ",
    "import numpy as np\n\n# Compute the mean of each column\n",
    "SELECT name, COUNT(*) FROM orders",
    "The three laws of thermodynamics are:\n1.",
    "Q: What is 17 + 25?\nA:",
    "List of planets: Mercury, Venus, Earth,",
    "Dear Sir or Madam,\n\nI am writing to",
    "In 1969, the first humans",
    "Roses are red,\nviolets are blue,\n",
    "<html>\n<head>\n<title>",
    '{"name": "Alice", "age": 30, "city":',
    "Water boils at 100 degrees Celsius because",
    "La vie est belle et",
    "El perro corre por",
    "Das Wetter ist heute",
    "こんにちは、私の名前は",
    "今天天气很好，我们",  # noqa: RUF001
    "Привет! Как",
    "I love pizza 🍕 and ice cream 🍦 because",
    "a b c d e f g",
    "1, 1, 2, 3, 5, 8, 13,",
    "The quick brown fox",
    "To be, or not to be, that is",
    "Photosynthesis is the process by which",
    "   indented text with   odd   spaces\n\n\n",
    "Breaking news: scientists have discovered that",
]

CHATS = [
    [{"role": "user", "content": "What is gravity?"}],
    [{"role": "user", "content": "Write a haiku about the sea."}],
    [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
    ],
    [
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hello! How can I help you today?"},
        {"role": "user", "content": "Name three fruits, as a list."},
    ],
    [{"role": "user", "content": "Translate to French: 'Good morning, my friend.'"}],
    [{"role": "user", "content": "Reverse the string 'headrace' in Python."}],
]

# No numbers beyond ASCII: the file's pre-tokenizer sets each apart, which `transformers` does not
# know when it reads GGUF files.
TEXTS = [
    *PROMPTS,
    "",
    " ",
    "\n",
    "\t\tx\r\n\r\n y",
    "    four spaces, then eight        and a tab\t.",
    "don't can't we'll they've I'm you'd it's DON'T WE'LL",
    "3.14159 1,000,000 0x1F 2024-11-29 007",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇫🇷 👍🏽 é é ﬁ ß İ",
    "漢字かなカナ 한국어 العربية עברית ไทย हिन्दी",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "text<|endoftext|>more <|im_end|>  <|im_start|> <|not_special|> <repo_name>",
    "for (int i = 0; i < n; ++i) { a[i] += b[i] * c; } // loop\n",
    "x = {'a': [1, 2, (3, 4)], \"b\": None}  # comment\n\n\nprint(x)",
    "https://example.org/path?query=1&other=%20#fragment user@example.org",
    "zero\u200bwidth, non\u00a0breaking, \u2028line\u2029paragraph, \ufeffmark, \x00 and \x7f",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "!!!???...---___***///\\\\\\|||~~~^^^",
]
