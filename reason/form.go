package reason

import (
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strings"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/lanekeeper/lanekeeper/internal/schema"
	"github.com/lanekeeper/lanekeeper/models"
)

// Form is the required JSON of a turn's answer. Each request carries the schema. The loop validates the answer and
// requests one correction, except of a cut, withheld or declined answer. Then the turn ends as EndedForm.
type Form struct {
	Name        string `json:"name,omitempty"`
	Description string `json:"description,omitempty"`
	// Schema is the text of a JSON Schema; empty accepts any object.
	Schema string `json:"schema,omitempty"`
	Strict bool   `json:"strict,omitempty"`
}

// Bounds of a form, which untrusted clients send.
const (
	maxSchema       = 64 << 10
	maxFormDepth    = 64
	maxChecks       = 200_000 // of schema parts per answer
	maxQuote        = 1_000   // bytes that quote a client or a model
	checksURL       = "form:checks"
	formMismatch    = "the answer did not have the requested form"
	formCorrection  = "Your answer does not have the form that was asked for: %s. Answer again, with that JSON alone."
	formCutOff      = "the answer was cut off at its limit of tokens"
	formFiltered    = "the model's provider withheld the answer"
	formNotAnswered = "the model declined"
)

var formName = regexp.MustCompile(`^[a-zA-Z0-9_-]{1,64}$`)

// errTooManyChecks ends a validation with too many checks.
var errTooManyChecks = errors.New("the schema takes too long to check")

// Check validates the form.
func (f Form) Check() error {
	if f.Schema == "" {
		return nil
	}
	if !formName.MatchString(f.Name) {
		return errors.New("its name must be 1 to 64 letters, digits, _ and -")
	}
	_, err := f.compile()
	return err
}

func (f Form) compile() (*jsonschema.Schema, error) {
	if len(f.Schema) > maxSchema {
		return nil, fmt.Errorf("it has more than %d bytes", maxSchema)
	}
	if schema.Depth([]byte(f.Schema), maxFormDepth) > maxFormDepth {
		return nil, fmt.Errorf("it is nested more than %d levels deep", maxFormDepth)
	}
	var doc any
	if err := json.Unmarshal([]byte(f.Schema), &doc); err != nil {
		return nil, fmt.Errorf("it is not JSON: %w", err)
	}
	if _, ok := doc.(map[string]any); !ok {
		return nil, errors.New("it is no object")
	}
	compiled, err := schema.Compile([]byte(f.Schema), countChecks)
	if err != nil {
		return nil, errors.New(truncate(schema.OneLine(err), maxQuote))
	}
	return compiled, nil
}

// countChecks bounds how many parts of a schema the compiled schema checks.
func countChecks(c *jsonschema.Compiler) {
	checks := new(checkCounter)
	c.RegisterVocabulary(&jsonschema.Vocabulary{
		URL: checksURL,
		Compile: func(*jsonschema.CompilerContext, map[string]any) (jsonschema.SchemaExt, error) {
			return checks, nil
		},
	})
	c.AssertVocabs()
}

// checkCounter bounds the checked schema parts. References can double the work at each level.
type checkCounter int

// Validate counts a check, and panics with errTooManyChecks above the bound.
func (c *checkCounter) Validate(*jsonschema.ValidatorContext, any) {
	if *c++; *c > maxChecks {
		panic(errTooManyChecks)
	}
}

// parse returns the answer's JSON without a code fence, or the problem.
func (f Form) parse(text string) (answer, problem string) {
	answer = trimFence(text)
	value, err := jsonschema.UnmarshalJSON(strings.NewReader(answer))
	if err != nil {
		return answer, "it is not JSON alone: " + truncate(err.Error(), maxQuote)
	}
	if f.Schema == "" {
		if _, ok := value.(map[string]any); !ok {
			return answer, "it is not a JSON object"
		}
		return answer, ""
	}
	compiled, err := f.compile()
	if err == nil {
		err = validate(compiled, value)
	}
	if err != nil {
		return answer, truncate(schema.OneLine(err), maxQuote)
	}
	return answer, ""
}

// validate validates a value within the bound of checks.
func validate(compiled *jsonschema.Schema, value any) (err error) {
	defer func() {
		switch p := recover(); {
		case p == nil:
		case p == any(errTooManyChecks):
			err = errTooManyChecks
		default:
			panic(p)
		}
	}()
	return compiled.Validate(value)
}

// trimFence removes a code fence around the whole text.
func trimFence(text string) string {
	text = strings.TrimSpace(text)
	inner, opened := strings.CutPrefix(text, "```")
	inner, closed := strings.CutSuffix(inner, "```")
	if !opened || !closed {
		return text
	}
	return strings.TrimSpace(strings.TrimPrefix(inner, "json"))
}

// schema returns the form for a request; nil for words.
func (f *Form) schema() *models.Schema {
	if f == nil {
		return nil
	}
	return &models.Schema{
		Name: f.Name, Description: f.Description, Schema: json.RawMessage(f.Schema), Strict: f.Strict,
	}
}
