//! Any text as a chat template: a prompt, or an error; never a panic, and never without end (templates have fuel). Not the
//! templates of real models (see the golden tests).
#![no_main]

use dsq_runtime::{Chat, ChatTemplate, Message};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    if let Ok(template) = ChatTemplate::new(text.into(), Some("<s>".into()), Some("</s>".into()), "template") {
        let messages = [Message::new("system", "be brief"), Message::new("user", "hello")];
        let _ = template.render(&Chat { messages: &messages, add_generation_prompt: true, ..Default::default() });
    }
});
