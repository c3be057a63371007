// Would catch: a template that takes the process, its memory or a request with it; a worker that is not replaced, not
// waited for, or keeps what was open; a message that reaches the template in another form than it reads; a continued
// message that ends where it should not, and a BOS that is there twice.
#include "engine/chat_template.h"

#include <dirent.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <future>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace terrace::engine {
namespace {

using std::chrono::seconds;
using testing::HasSubstr;

// A wait that is a failure, and not a measure: a busy machine gives a worker little.
constexpr TemplateBounds kPatient{.processor = seconds(60), .wait = seconds(120)};

openai::Request Asks(std::vector<openai::Message> messages) {
  openai::Request request;
  request.chat = true;
  request.messages = std::move(messages);
  return request;
}

openai::Message User(std::string content) { return {.role = "user", .content = std::move(content), .more = {}}; }
openai::Message Assistant(std::string content) {
  return {.role = "assistant", .content = std::move(content), .more = {}};
}

std::unique_ptr<ChatTemplate> Opened(ChatTemplateOptions options) {
  auto opened = ChatTemplate::Open(std::move(options));
  if (opened) return *std::move(opened);
  ADD_FAILURE() << opened.error().what;
  return nullptr;
}

std::unique_ptr<ChatTemplate> Opened(const std::string& source) {
  return Opened(ChatTemplateOptions{.source = source, .bounds = kPatient});
}

std::string Rendered(const std::string& source, const openai::Request& request) {
  const auto text = Opened(source)->Render(request);
  return text ? *text : "error: " + text.error().what;
}

// Processes that this one started and did not wait for.
std::vector<pid_t> Children() {
  std::vector<pid_t> children;
  DIR* proc = opendir("/proc");
  while (const dirent* entry = readdir(proc)) {
    std::ifstream file(std::string("/proc/") + entry->d_name + "/stat");
    std::string line;
    if (!std::getline(file, line)) continue;
    char state = 0;
    pid_t parent = 0;
    std::istringstream(line.substr(line.rfind(')') + 1)) >> state >> parent;
    if (parent == getpid()) children.push_back(static_cast<pid_t>(std::strtol(line.c_str(), nullptr, 10)));
  }
  closedir(proc);
  return children;
}

TEST(ChatTemplate, SeesWhatTransformersNames) {
  const std::string source =
      "{{ bos_token }}|{{ eos_token }}|{{ tools is none }}|{{ documents is none }}|{{ add_generation_prompt }}|"
      "{% for m in messages %}{{ m.role }}={{ m['content'] }};{% endfor %}{{ enable_thinking }}";
  openai::Request request = Asks({User("hi"), Assistant("")});
  request.chat_template_kwargs = R"({"enable_thinking":false})";
  const auto chat = Opened({.source = source, .bos = "<s>", .eos = "</s>", .bounds = kPatient});
  EXPECT_EQ(chat->Render(request).value(), "<s>|</s>|True|True|True|user=hi;assistant=;False");
}

TEST(ChatTemplate, SeesMessagesInTheFormThatItReads) {
  openai::Request request = Asks({{.role = "developer", .content = "a", .more = {}}, User("b")});
  const std::string roles = "{% for m in messages %}{{ m.role }} {{ m.content }};{% endfor %}";
  EXPECT_EQ(Rendered(roles, request), "system a;user b;");
  EXPECT_EQ(Rendered("{# developer #}" + roles, request), "developer a;user b;");
  EXPECT_EQ(
      Rendered("{% for m in messages %}{% for p in m.content %}{% if p.type == 'text' %}[{{ p['text'] }}]{% endif %}"
               "{% endfor %}{{ m.content[0].text }}{% endfor %}",
               Asks({User("b")})),
      "[b]b");
}

TEST(ChatTemplate, SeesToolCallsInTheFormThatItReads) {
  openai::Request request = Asks({User("b")});
  request.messages.push_back(
      {.role = "assistant",
       .content = "",
       .more = R"({"tool_calls":[{"type":"function","function":{"name":"f","arguments":"{\"z\":1,\"a\":\"b\"}"}}]})"});
  const std::string head =
      "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}{{ m.content is none }} ";
  const std::string tail = "{% endfor %}{% endif %}{% endfor %}";
  EXPECT_EQ(Rendered(head + "{{ c.function.arguments }}" + tail, request), R"(True {"z":1,"a":"b"})");
  EXPECT_EQ(
      Rendered(head + "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }},{% endfor %}" + tail, request),
      "True z=1,a=b,");
}

TEST(ChatTemplate, RefusesInTheTemplatesOwnWords) {
  const auto chat =
      Opened("{% if messages[0].role != 'user' %}{{ raise_exception('Talk\nfirst: user') }}{% endif %}ok");
  const auto refused = chat->Render(Asks({Assistant("x")}));
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Code::kInvalid);
  EXPECT_EQ(refused.error().what, "Talk\nfirst: user");
  EXPECT_EQ(chat->Render(Asks({User("x")})).value(), "ok");
}

TEST(ChatTemplate, SaysWhereItGoesWrong) {
  const auto refused = Opened("a\n{{ messages | nonsense }}")->Render(Asks({User("x")}));
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Code::kInvalid);
  EXPECT_THAT(refused.error().what,
              testing::AllOf(HasSubstr("nonsense"), HasSubstr("line 2, column"), testing::Not(HasSubstr("\n"))));
}

TEST(ChatTemplate, IsNotOpenedIfItCannotBeRead) {
  for (const char* source :
       {"{% if x %}", "{{ 1 + }}", "{% nonsense %}", "{{ 'x }}", "{# never", "{% for %}{% endfor %}"}) {
    const auto opened = ChatTemplate::Open({.source = source, .bounds = kPatient});
    ASSERT_FALSE(opened) << source;
    EXPECT_EQ(opened.error().code, Code::kInvalid) << source << ": " << opened.error().what;
    EXPECT_EQ(opened.error().what.find('\n'), std::string::npos) << opened.error().what;
  }
  const auto nowhere = ChatTemplate::Open({.source = "x", .worker = {"/nonexistent"}});
  ASSERT_FALSE(nowhere);
  EXPECT_EQ(nowhere.error().code, Code::kUnavailable);
}

// What no engine should be asked for. Only when asked to render, or each is refused when it is opened.
const std::string kWhenAsked = "{% if go %}";
constexpr const char* kEndless[] = {
    // Loops.
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% "
    "endfor %}",
    // Lists, text, numbers without end.
    "{% for a in range(99999999999) %}{% endfor %}",
    "{% set n = namespace(s='aaaaaaaaaaaaaaaa') %}{% for a in range(64) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s "
    "}}",
    // A macro that calls itself; values that hold themselves.
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% set a = [] %}{% set b = a.append(a) %}{{ a == a }}{{ a | tojson }}",
    "{% set n = namespace() %}{% set n.n = n %}{{ n | tojson }}",
};

TEST(ChatTemplate, AnEndlessOneIsEndedAndHarmsNobody) {
  for (const std::string endless : kEndless) {
    SCOPED_TRACE(endless);
    TemplateBounds bounds{.processor = seconds(1), .wait = seconds(120), .memory_bytes = 512 << 20};
    const auto chat = Opened({.source = kWhenAsked + endless + "{% endif %}fine", .bounds = bounds});
    openai::Request request = Asks({User("x")});
    request.chat_template_kwargs = R"({"go":true})";
    const auto ended = chat->Render(request);
    ASSERT_FALSE(ended);
    EXPECT_TRUE(ended.error().code == Code::kTimeout || ended.error().code == Code::kFull) << ended.error().what;
    EXPECT_THAT(ended.error().what, HasSubstr("it "));
    EXPECT_EQ(chat->Render(Asks({User("x")})).value(), "fine");
  }
  EXPECT_TRUE(Children().empty()) << "a worker was not waited for";
}

TEST(ChatTemplate, OneThatNestsWithoutEndIsNotOpened) {
  const auto many = [](const char* text) {
    std::string all;
    for (int i = 0; i < 200'000; ++i) all += text;
    return all;
  };
  for (const std::string& source : {"{{ " + many("("), "{{ x" + many("[x") + " }}", "{{ " + many("not ") + "x }}",
                                    "{{ x" + many(" + x") + " }}", many("{% if x %}"), "{{ x" + many("|f") + " }}"}) {
    const auto opened =
        ChatTemplate::Open({.source = source, .bounds = {.processor = seconds(5), .wait = seconds(120)}});
    if (opened) continue;  // Long, and not nested: it may well be read.
    EXPECT_NE(opened.error().code, Code::kInternal) << opened.error().what;
  }
  EXPECT_EQ(Opened("fine")->Render(Asks({User("x")})).value(), "fine");
}

TEST(ChatTemplate, TooMuchTextIsRefused) {
  TemplateBounds bounds = kPatient;
  bounds.text_bytes = 1 << 20;
  const auto chat = Opened({.source = "{{ messages[0].content }}", .bounds = bounds});
  const auto refused = chat->Render(Asks({User(std::string((1 << 20) + 1, 'x'))}));
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Code::kFull);
  EXPECT_EQ(chat->Render(Asks({User(std::string(1 << 20, 'x'))})).value().size(), 1u << 20);
}

TEST(ChatTemplate, TheLargestBodyFitsItsBounds) {
  const std::string body(60 << 20, 'x');
  TemplateBounds bounds;
  bounds.processor = kPatient.processor, bounds.wait = kPatient.wait;
  const auto chat = Opened(
      {.source = "{% for m in messages %}<{{ m.role }}>{{ m['content'] | trim }}{% endfor %}", .bounds = bounds});
  const auto text = chat->Render(Asks({User(body)}));
  ASSERT_TRUE(text) << text.error().what;
  EXPECT_EQ(text->size(), body.size() + 6);
}

TEST(ChatTemplate, AWorkerThatDiedIdleIsReplaced) {
  const auto chat = Opened("{{ messages[0].content }}");
  for (int i = 0; i < 3; ++i) {
    const std::vector<pid_t> children = Children();
    ASSERT_EQ(children.size(), 1u);
    kill(children[0], SIGKILL);
    EXPECT_EQ(chat->Render(Asks({User("still here")})).value(), "still here");
  }
}

TEST(ChatTemplate, AWorkerThatHangsIsGivenUp) {
  const auto chat =
      Opened({.source = "{{ messages[0].content }}", .bounds = {.processor = seconds(60), .wait = seconds(1)}});
  kill(Children().at(0), SIGSTOP);
  const auto refused = chat->Render(Asks({User("x")}));
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Code::kUnavailable);
}

TEST(ChatTemplate, AStopOfTheGroupDoesNotReachTheWorker) {
  const auto chat = Opened("{{ messages[0].content }}");
  const pid_t worker = Children().at(0);
  EXPECT_NE(getpgid(worker), getpgid(0));
  kill(worker, SIGTERM);
  kill(worker, SIGINT);
  EXPECT_EQ(chat->Render(Asks({User("x")})).value(), "x");
  EXPECT_EQ(Children().at(0), worker);
}

TEST(ChatTemplate, AWorkerHasNothingOpenButItsSocket) {
  const int open_here = open("/dev/zero", O_RDONLY);
  const auto chat = Opened("x");
  const std::string folder = "/proc/" + std::to_string(Children().at(0)) + "/fd";
  DIR* files = opendir(folder.c_str());
  int count = -2;  // . and ..
  while (readdir(files) != nullptr) ++count;
  closedir(files);
  close(open_here);
  EXPECT_EQ(count, 3);
}

TEST(ChatTemplate, ManyThreadsRenderAtOnce) {
  const auto chat = Opened("{% for m in messages %}{{ m.content }}{% endfor %}");
  std::vector<std::thread> threads;
  std::atomic<int> right{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&chat, &right, t] {
      for (int i = 0; i < 50; ++i) {
        const std::string text = "thread " + std::to_string(t) + " round " + std::to_string(i);
        if (chat->Render(Asks({User(text)})).value() == text) ++right;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(right, 200);
  EXPECT_LE(Children().size(), 4u);
}

std::string Continued(const std::string& source, const std::string& last) {
  openai::Request request = Asks({User("q"), Assistant(last)});
  request.add_generation_prompt = false;
  request.continue_final_message = true;
  return Rendered(source, request);
}

TEST(ChatTemplate, ContinuesTheLastMessage) {
  const std::string plain = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>\n{% endfor %}";
  const std::string trims = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>\n{% endfor %}";
  EXPECT_EQ(Continued(plain, "It is"), "<user>q</>\n<assistant>It is");
  EXPECT_EQ(Continued(plain, " It is "), "<user>q</>\n<assistant> It is ");
  EXPECT_EQ(Continued(trims, " It is "), "<user>q</>\n<assistant>It is");
  EXPECT_EQ(Continued(plain, "q"), "<user>q</>\n<assistant>q");
  EXPECT_THAT(Continued("{{ messages[0].content }}", "It is"), HasSubstr("can't be continued"));
}

TEST(ChatTemplate, PutsOneBosOnly) {
  const openai::Request request = Asks({User("x")});
  const auto with = [&](const char* source, bool added) {
    const auto chat = Opened({.source = source, .bos = "<s>", .bos_is_added = added, .bounds = kPatient});
    return chat->Render(request).value();
  };
  EXPECT_EQ(with("{{ bos_token }}a", true), "a");
  EXPECT_EQ(with("{{ bos_token }}a", false), "<s>a");
  EXPECT_EQ(with("a{{ bos_token }}", true), "a<s>");
}

TEST(ChatTemplate, ZeroesAndAnyTextPassAsTheyAre) {
  const std::string text("a\0b\xf0\x9f\x98\x80\"\\\n{{ x }}", 15);
  EXPECT_EQ(Rendered("{{ messages[0].content }}", Asks({User(text)})), text);
}

}  // namespace
}  // namespace terrace::engine

// The worker is this program in another role.
int main(int argc, char** argv) {
  if (argc == 2 && std::string_view(argv[1]) == "template-worker") return terrace::RunTemplateWorker();
  testing::InitGoogleMock(&argc, argv);
  return RUN_ALL_TESTS();
}
