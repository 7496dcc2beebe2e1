package executions_test

import (
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/lanekeeper/lanekeeper/executions"
)

// Every value and every free text of a row is shown without its secrets and bounded; the row itself stays as it is.
func TestWhatIsShownHoldsNoSecret(t *testing.T) {
	const secret = "Zq81xLm0Kk77"
	texts := map[string]bool{
		"ResultSummary": true, "WaitingKey": true, "ErrorMessage": true, "FailedStep": true, "CancelReason": true, "DedupeKey": true,
		"Step": true,
	}
	for _, long := range []string{"", strings.Repeat("x ", 100<<10)} {
		text := "password=" + secret + " " + long
		for _, row := range []any{&executions.Execution{}, &executions.Checkpoint{}} {
			v := reflect.ValueOf(row).Elem()
			for i := range v.NumField() {
				switch field := v.Field(i).Addr().Interface().(type) {
				case *json.RawMessage:
					*field = json.RawMessage(fmt.Sprintf(`{"token": %q, "said": %q}`, secret, text))
				case *string:
					if texts[v.Type().Field(i).Name] {
						*field = text
					}
				case **string:
					if texts[v.Type().Field(i).Name] {
						*field = &text
					}
				}
			}
			before := fmt.Sprintf("%+v", v.Interface())
			got, err := json.Marshal(v.Addr().MethodByName("Redacted").Call(nil)[0].Interface())
			if err != nil {
				t.Fatal(err)
			}
			if strings.Contains(string(got), secret) || !strings.Contains(string(got), "[redacted]") || len(got) > 10*(64<<10)+4096 {
				t.Errorf("%T: %d bytes: %.2000s", row, len(got), got)
			}
			if fmt.Sprintf("%+v", v.Interface()) != before {
				t.Errorf("%T: the row was changed", row)
			}
		}
	}
}

func TestWhatHoldsNoSecretIsShownAsItIs(t *testing.T) {
	x := executions.Execution{ID: "1", Input: json.RawMessage(`{"n":1.50}`), ResultSummary: "done", WaitingKey: new("invoice-7")}
	if diff := cmp.Diff(x, x.Redacted()); diff != "" {
		t.Error(diff)
	}
	c := executions.Checkpoint{Step: "look#2", Output: json.RawMessage(`[1,"a"]`)}
	if diff := cmp.Diff(c, c.Redacted()); diff != "" {
		t.Error(diff)
	}
}
