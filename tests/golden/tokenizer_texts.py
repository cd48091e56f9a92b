"""The texts whose token ids smollm2_tokenizer.json holds."""

PLAIN = [
    "", " ", "  ", "   ", "\n", "\n\n", "\n\n\n", "\t", "\t\t", " \n", "\n ", "\r\n", "\r", " \t \n ", "a", " a", "a ", "  a", "a  ",
    "\n a", "a\n", "a\n\nb", "a \n b", "a\t\tb", "a\r\nb", "x" * 40, " " * 17, " " * 64 + "x", "\n" * 9, "\t" * 5 + "x",
    "Hello, world!", "Hello,world!", "hello", "HELLO", "hElLo WoRlD", " hello  world   again", "The quick brown fox jumps over the lazy dog.",
    "don't", "I'm", "you're we've they'll he'd it's", "DON'T I'M", "rock 'n' roll", "'s", "''", "'", "\"quoted\"", "it’s curly", "‘a’ “b”",
    "...", "....", "…", "?!", "!!!!!!!!", "--", "---", "—", "a-b", "a - b", "a/b", "a\\b", "#", "##", "# Heading", "* item", "- item",
    "$100", "100%", "(a)", "[b]", "{c}", "<d>", "@user", "a@b.com", "https://example.com/a?b=c&d=e#f", "~!@#$%^&*()_+`-={}|[]\\:\";'<>?,./",
]
DIGITS = [
    "0", "1", "12", "123", "1234", "12345", "1234567890", "3.14159", "1,000,000", "-1", "1e-5", "0x1F", "v1.2.3", "2024-05-01", "12:34:56",
    "a1b2", "1a2b", "1 2 3", "10 20", "٣٤٥", "१२३", "½", "²³", "Ⅳ", "①②", "１２３", "𝟘𝟙𝟚", "3rd", "50°C", "5'10\"",
    "\n\n3", "a\n\n3\n\nb", "  12", "a  1", "\t\t5", " \n 7", "1  2", "1\n\n2", "x1  y2", "   ½", "\n\n²", "!!1", "a's1's", " 1's",
]
SCRIPTS = [
    "Ünïcödé", "naïve café", "Straße", "Ærøskøbing", "Łódź", "İstanbul ıİ", "Việt Nam", "Tiếng Việt có dấu", "Français : « guillemets »", "¿Qué? ¡Hola!",
    "Привет, мир", "Здравствуйте! Как дела?", "Україна", "Γειά σου Κόσμε", "Հայաստան", "საქართველო",
    "שלום עולם", "שָׁלוֹם", "مرحبا بالعالم", "السَّلَامُ عَلَيْكُمْ", "سلام دنیا", "اردو زبان",
    "नमस्ते दुनिया", "বাংলা ভাষা", "தமிழ் மொழி", "తెలుగు", "ಕನ್ನಡ", "മലയാളം", "ગુજરાતી", "ਪੰਜਾਬੀ", "සිංහල",
    "สวัสดีชาวโลก", "ພາສາລາວ", "ភាសាខ្មែរ", "မြန်မာဘာသာ", "བོད་ཡིག", "አማርኛ",
    "你好，世界", "中文测试一二三", "繁體中文", "日本語のテスト", "ひらがな カタカナ", "ｶﾀｶﾅ", "안녕하세요 세계", "한국어",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢", "𐍈𐌰𐌽", "𒀀𒀁", "ⲁⲃⲅ", "ᚠᚢᚦ", "ᏣᎳᎩ", "ꙮ", "mixed English и русский と日本語",
]
MARKS = [
    "e\u0301", "cafe\u0301", "\u0301", "a\u0308\u0301", "Z\u0351\u036f\u0321A\u0317L\u0347G\u0328O\u0322", "n\u0303o", "\u1100\u1161\u11a8", "\u0b95\u0bcd\u0bb7",
    "a\u200bb", "a\u200db", "a\u00a0b", "\u00a0", "a\u2003b", "\u3000", "a\u2028b", "a\u2029b", "\u200e\u200f", "a\u00adb", "\ufeffbom", "\ufffd",
    "a\u0085b", "\u000b\u000c", "\u0001\u0002", "a\u0000b", "\u007f", "\u2060", "x\u0338",
]
EMOJI = [
    "🙂", "🙂🙂", "a🙂b", " 🙂 ", "👍🏽", "👩‍👩‍👧‍👦", "🏳️‍🌈", "🇫🇷🇯🇵", "❤️", "❤", "1️⃣", "☺️☹", "🤖🧠💾", "🫠", "→←↑↓", "✓✗", "♥♦♣♠", "½¼", "€£¥₿", "©®™",
]
MATH = ["∑_{i=1}^n x_i²", "∀x∈ℝ: √x ≥ 0", "α+β=γ", "E = mc²", "a ≠ b ≤ c", "$\\frac{a}{b}$", "\\begin{align}x&=1\\\\\\end{align}"]
CODE = [
    "def f(x):\n    return x + 1\n", "for i in range(10):\n\tprint(i)\n", "if (a && b || !c) { return; }", "x = [1, 2, 3]", "lambda x: x**2",
    "#include <stdio.h>\nint main(void) {\n  printf(\"%d\\n\", 42);\n  return 0;\n}\n", "fn main() -> Result<(), Box<dyn Error>> { Ok(()) }",
    "let v: Vec<u8> = vec![0u8; 16];", "SELECT * FROM t WHERE a = 'b' AND c >= 10;", "<div class=\"a\"><p>Hi</p></div>", "{\"key\": [1, 2.5, null, true]}",
    "a_b_c", "camelCaseName", "SCREAMING_SNAKE", "snake_case_name42", "x+=1", "x==y", "x!=y", "a->b", "a::b", "a<<b>>c", "//comment", "/* c */", "    indented",
    "        eight", "\tif x:\n\t\ty\n", "if x:\r\n    y\r\n", "^\\d{3}-\\d{4}$", "C:\\Users\\me", "/usr/bin/env", "$HOME/.cargo", "git commit -m \"x\"", "0b1010 | 0o17",
    "class A(B):\n\n    def __init__(self):\n        self.x = None\n\n\n    pass\n", "```rust\nfn main() {}\n```", "|a|b|\n|-|-|\n|1|2|\n",
]
SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "a<|endoftext|>b", "a <|endoftext|> b",
    "<|endoftext|><|endoftext|>", "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n",
    "<|im_start|>  x", "x  <|im_end|>", "\n<|im_end|>\n", "<|im_start", "|im_start|>", "< |im_start|>", "<|IM_START|>", "<|unknown|>",
    "<repo_name>a/b", "<reponame>", "<file_sep>", "<filename>x.py", "<gh_stars>100", "<issue_start>", "<issue_comment>", "<issue_closed>", "<jupyter_start>",
    "<jupyter_text>", "<jupyter_code>x=1", "<jupyter_output>1", "<jupyter_script>", "<empty_output>", "<s>", "</s>", "<unk>", "<pad>", "[INST]",
    "<|im_end|>12", "12<|im_end|>", "é<|im_end|>é", "🙂<|im_start|>🙂",
]
PROSE = [
    "SmolLM2 is a family of compact language models available in three sizes: 135M, 360M, and 1.7B parameters.",
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness,\nit was the epoch of belief,",
    "1. First\n2. Second\n   a) nested\n\n3. Third\n", "Dear Sir/Madam,\n\n\tI write re: invoice #00123 (£45.60).\n\nYours,\nA. B.  \n",
    "antidisestablishmentarianism pneumonoultramicroscopicsilicovolcanoconiosis", "aaaaaaaaaabbbbbbbbbb", "thethethethe", "          leading and trailing          ",
    "TAB\tTAB\t\tEND", "line1\nline2\r\nline3\rline4", "ends with newline\n", "ends with space ", "ends with two  ", "ends with tab\t", "x \n\n y", "  \n  \n  z",
]

TEXTS = PLAIN + DIGITS + SCRIPTS + MARKS + EMOJI + MATH + CODE + SPECIAL + PROSE
assert len(TEXTS) == len(set(TEXTS)) >= 200, len(TEXTS)
