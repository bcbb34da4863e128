#include "json.h"

namespace clover {

namespace {
constexpr int kDEPTH = 32;
}

class JsonReader {
public:
    explicit JsonReader(std::string_view text) : mText(text) {}

    Json document() {
        Json made = value(0);
        space();
        if (mAt != mText.size()) fail("something follows its end");
        return made;
    }

private:
    [[noreturn]] void fail(std::string const& why) const {
        throw Fault("the launch plan is no JSON at byte " + std::to_string(mAt) + ": " + why);
    }

    void space() {
        while (mAt < mText.size() && (mText[mAt] == ' ' || mText[mAt] == '\n')) ++mAt;
    }

    char next() {
        if (mAt >= mText.size()) fail("it ends early");
        return mText[mAt++];
    }

    bool take(char wanted) {
        space();
        if (mAt >= mText.size() || mText[mAt] != wanted) return false;
        ++mAt;
        return true;
    }

    void expect(char wanted) {
        if (!take(wanted)) fail(std::string("'") + wanted + "' is missing");
    }

    Json value(int depth) {
        if (depth > kDEPTH) fail("it is nested too deeply");
        space();
        if (mAt >= mText.size()) fail("it ends early");
        Json made;
        char const first = mText[mAt];
        if (first == '{') {
            made.mKind = Json::Kind::object;
            object(made, depth);
        } else if (first == '[') {
            made.mKind = Json::Kind::array;
            array(made, depth);
        } else if (first == '"') {
            made.mKind = Json::Kind::string;
            made.mString = text();
        } else if (first == '-' || (first >= '0' && first <= '9')) {
            made.mKind = Json::Kind::integer;
            made.mInteger = number();
        } else if (word("null")) {
            made.mKind = Json::Kind::null;
        } else if (word("true") || word("false")) {
            made.mKind = Json::Kind::boolean;
            made.mInteger = first == 't';
        } else {
            fail("no value");
        }
        return made;
    }

    bool word(std::string_view name) {
        if (mText.substr(mAt, name.size()) != name) return false;
        mAt += name.size();
        return true;
    }

    void object(Json& made, int depth) {
        expect('{');
        if (take('}')) return;
        do {
            space();
            std::string name = text();
            expect(':');
            made.mMembers.emplace_back(std::move(name), value(depth + 1));
        } while (take(','));
        expect('}');
    }

    void array(Json& made, int depth) {
        expect('[');
        if (take(']')) return;
        do made.mArray.push_back(value(depth + 1));
        while (take(','));
        expect(']');
    }

    std::string text() {
        if (next() != '"') fail("a string is missing");
        std::string made;
        for (char c = next(); c != '"'; c = next()) {
            if (static_cast<unsigned char>(c) < 0x20) fail("a control character in a string");
            if (c == '\\') {
                c = next();
                if (c != '"' && c != '\\' && c != '/') fail("an escape that plans do not use");
            }
            made.push_back(c);
        }
        return made;
    }

    int64_t number() {
        bool const negative = mText[mAt] == '-';
        if (negative) ++mAt;
        int64_t made = 0;
        std::size_t const start = mAt;
        while (mAt < mText.size() && mText[mAt] >= '0' && mText[mAt] <= '9') {
            int const digit = mText[mAt++] - '0';
            if (__builtin_mul_overflow(made, int64_t{10}, &made)
                || __builtin_add_overflow(made, int64_t{digit}, &made))
                fail("a number leaves 64 bits");
        }
        if (mAt == start) fail("a number without digits");
        if (mAt < mText.size() && (mText[mAt] == '.' || mText[mAt] == 'e' || mText[mAt] == 'E'))
            fail("a number that is not whole");
        return negative ? -made : made;
    }

    std::string_view mText;
    std::size_t mAt{0};
};

Json Json::parse(std::string_view text) { return JsonReader(text).document(); }

int64_t Json::integer() const {
    if (mKind != Kind::integer) throw Fault("the launch plan lacks an integer");
    return mInteger;
}

int64_t Json::count(int64_t most) const {
    int64_t const value = integer();
    if (value < 0 || value > most)
        throw Fault("the launch plan holds " + std::to_string(value) + " where 0.."
            + std::to_string(most) + " is meant");
    return value;
}

std::string const& Json::string() const {
    if (mKind != Kind::string) throw Fault("the launch plan lacks a string");
    return mString;
}

std::vector<Json> const& Json::array() const {
    if (mKind != Kind::array) throw Fault("the launch plan lacks a list");
    return mArray;
}

Json const& Json::operator[](char const* name) const {
    for (auto const& [key, value] : mMembers)
        if (key == name) return value;
    throw Fault(std::string("the launch plan lacks \"") + name + "\"");
}

}  // namespace clover
